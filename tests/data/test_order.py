"""The order of examples."""

import time

from rl.data import order
from rl.data.order import epoch_index, epoch_order, step_indices


def test_an_epoch_has_every_example_once_in_an_order_of_its_own():
    orders = {tuple(epoch_order(seed, epoch, 20)) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4
    assert all(sorted(order) == list(range(20)) for order in orders)


def test_batches_follow_the_stream_without_gaps():
    stream = [epoch_index(3, number, 7) for number in range(24)]
    batches = [step_indices(3, step, 4, 7) for step in range(6)]
    assert [index for batch in batches for index in batch] == stream
    assert sorted(stream[:7]) == sorted(stream[7:14]) == list(range(7))


def test_the_order_is_the_same_in_every_version():
    assert step_indices(7, 0, 10, 5) == [0, 3, 4, 1, 2, 2, 1, 0, 4, 3]


def test_a_large_order_is_ready_before_its_epoch_begins(monkeypatch):
    monkeypatch.setattr(order, "PREPARED", 30)
    epoch_order.cache_clear()
    for number in range(16):
        epoch_index(9, number, 30)
    deadline = time.monotonic() + 60
    while epoch_order.cache_info().currsize < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    misses = epoch_order.cache_info().misses
    assert len({epoch_index(9, number, 30) for number in range(30, 45)}) == 15
    assert epoch_order.cache_info().misses == misses
