"""The transport follows from the hosts of the ranks, unless the config names one."""

import pytest

from rl.platform import memory_domain
from rl.weights import shared_memory
from rl.weights.open import choose_transport


@pytest.mark.parametrize(
    ("wish", "domains", "transport"),
    [
        ("auto", ["a", "a", "a"], "shared_memory"),
        ("auto", ["a", "b", "a"], "rdma"),
        ("torchstore", ["a", "a"], "torchstore"),
        ("shared_memory", ["a", "b"], "shared_memory"),
    ],
)
def test_one_host_uses_shared_memory_and_several_use_a_network(wish, domains, transport):
    assert choose_transport(wish, domains) == transport


def test_shared_memory_of_another_host_is_refused_with_the_fix(monkeypatch):
    from tests.weights.test_shared_memory import (
        SHAPE,
        SharedMemoryPublisher,
        SharedMemorySubscriber,
        rows,
        torch,
    )

    publisher = SharedMemoryPublisher([rows(torch.zeros(SHAPE), 0, 6)], torch.float32)
    monkeypatch.setattr(shared_memory, "memory_domain", lambda: "elsewhere")
    with pytest.raises(
        RuntimeError,
        match=rf"{memory_domain()}.*'elsewhere|elsewhere.*set weights.transport to 'rdma'",
    ):
        SharedMemorySubscriber([publisher.address], [rows(torch.zeros(SHAPE), 0, 6)], reader=0)
    publisher.close()
