"""The push on one host gives whole versions or an error and reuses no slot under a reader."""

import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from rl.errors import RunError
from rl.model.shards import Box, Region, Shard
from rl.weights import shared_memory
from rl.weights.shared_memory import SharedMemoryPublisher, SharedMemorySubscriber
from tests.warm import FORK

SHAPE = (6, 4)


def rows(tensor: torch.Tensor, start: int, stop: int) -> Shard:
    return Shard(Region("w", SHAPE, Box((start, 0), (stop - start, SHAPE[1]))), tensor[start:stop])


@pytest.fixture
def pair():
    """Return two trainer ranks with three rows each and a reader of rows 2 to 4 in bfloat16."""
    trained = torch.randn(SHAPE)
    publishers = [SharedMemoryPublisher([rows(trained, s, s + 3)], torch.bfloat16) for s in (0, 3)]
    pulled = torch.zeros(SHAPE, dtype=torch.bfloat16)
    subscriber = SharedMemorySubscriber(
        [p.address for p in publishers], [rows(pulled, 2, 5)], reader=0
    )
    return trained, publishers, pulled, subscriber


def publish(publishers: list[SharedMemoryPublisher], version: int) -> None:
    for publisher in publishers:
        publisher.write(version)


def test_each_version_arrives_cast_and_whole(pair):
    trained, publishers, pulled, subscriber = pair
    for version in range(5):
        trained.add_(1.0)
        publish(publishers, version)
        assert subscriber.pull(version) == version
        assert torch.equal(pulled[2:5], trained[2:5].to(torch.bfloat16))
    assert not pulled[:2].any()


def test_changes_after_publish_do_not_arrive(pair):
    trained, publishers, pulled, subscriber = pair
    publish(publishers, 0)
    expected = trained[2:5].to(torch.bfloat16)
    trained.zero_()
    subscriber.pull(0)
    assert torch.equal(pulled[2:5], expected)


def test_a_version_that_some_rank_lacks_is_refused(pair):
    _, publishers, pulled, subscriber = pair
    with pytest.raises(
        RunError,
        match="pull of version 0: trainer rank 0 holds nothing; trainer rank 1 holds nothing",
    ):
        subscriber.pull(0)
    publishers[0].write(0)
    with pytest.raises(RunError, match=r"trainer rank 0 holds \[0\]; trainer rank 1 holds nothing"):
        subscriber.pull(0)
    publish(publishers, 1)
    with pytest.raises(
        RunError,
        match=r"pull of version 2: trainer rank 0 holds \[0, 1\]; trainer rank 1 holds \[1\]",
    ):
        subscriber.pull(2)
    assert not pulled.any()


def test_a_pull_of_a_replaced_version_takes_the_newest_that_all_ranks_hold(pair):
    trained, publishers, pulled, subscriber = pair
    for version in range(4):
        trained.add_(1.0)
        publish(publishers, version)
    expected = trained[2:5].to(torch.bfloat16)
    trained.add_(1.0)
    publishers[0].write(4)  # rank 1 does not have version 4 yet
    assert subscriber.pull(1) == 3
    assert torch.equal(pulled[2:5], expected)


def test_a_slot_rewritten_before_it_is_locked_is_not_read(pair, monkeypatch):
    trained, publishers, pulled, subscriber = pair
    publish(publishers, 0)
    trained.add_(1.0)
    publishers[0].write(1)
    expected = trained[2:5].to(torch.bfloat16)
    lock = shared_memory._Slot.lock
    last = subscriber._sources[1]

    def lock_late(slot, kind):
        if slot in last:
            monkeypatch.undo()
            publishers[1].write(1)
            trained.add_(1.0)
            publishers[1].write(2)
        return lock(slot, kind)

    monkeypatch.setattr(shared_memory._Slot, "lock", lock_late)
    assert subscriber.pull(0) == 1
    assert torch.equal(pulled[2:5], expected)


def test_a_reader_always_finds_a_version_while_the_writer_continues(monkeypatch):
    """The reader checks each slot exactly while the slot is written."""
    weights = torch.ones(SHAPE)
    pulled = torch.zeros(SHAPE)
    publisher = SharedMemoryPublisher([rows(weights, 0, 6)], torch.float32)
    subscriber = SharedMemorySubscriber([publisher.address], [rows(pulled, 0, 6)], reader=0)

    def writing():
        """Write versions 2 and 3 with a pause within each write, and after the last."""
        for version in (2, 3):
            with publisher._claimed(version) as slot:
                yield
                slot.views[0].fill_(version)
                slot.version = version
        yield

    for version in (0, 1):
        publisher.write(version)
    writer = writing()
    next(writer)
    looks = 0

    def version_of(slot):
        nonlocal looks
        seen = int(slot.header[0]) - 1
        if slot not in publisher._slots:
            looks += 1
            if looks > 2:  # the first two find that version 0 is gone
                next(writer, None)
        return seen

    monkeypatch.setattr(
        shared_memory._Slot, "version", property(version_of, shared_memory._Slot.version.fset)
    )
    monkeypatch.setattr(shared_memory.time, "sleep", lambda _: next(writer, None))
    version = subscriber.pull(0)
    assert version in (2, 3)
    assert (pulled == version).all()


def test_versions_may_go_back_as_after_loading_a_checkpoint(pair):
    trained, publishers, pulled, subscriber = pair
    for version in (6, 7, 4, 5):
        trained.add_(1.0)
        publish(publishers, version)
        assert subscriber.pull(version) == version
        assert torch.equal(pulled[2:5], trained[2:5].to(torch.bfloat16))
    assert subscriber.pull(4) == 4


def test_a_slot_is_not_reused_under_a_reader(pair):
    trained, publishers, pulled, subscriber = pair
    publish(publishers, 0)
    publish(publishers, 1)
    claimed = subscriber.claim(0)
    publishers[0]._patience = 0.05
    with pytest.raises(
        RunError, match="publish of version 2: a generator rank has been copying version 0 for"
    ):
        publishers[0].write(2)
    subscriber.release(claimed)
    publish(publishers, 2)
    assert subscriber.pull(2) == 2
    assert torch.equal(pulled[2:5], trained[2:5].to(torch.bfloat16))


def test_a_slot_of_a_writer_that_died_within_a_write_is_refused(pair):
    _, publishers, _, subscriber = pair
    publish(publishers, 0)
    publish(publishers, 1)
    publishers[1]._tensors = [torch.zeros(3, 3, 3, 4)]  # does not fit: the copy raises
    with pytest.raises(RuntimeError):
        publishers[1].write(2)
    publishers[0].write(2)
    with pytest.raises(
        RunError,
        match=r"pull of version 2: trainer rank 0 holds \[1, 2\]; trainer rank 1 holds \[1\]",
    ):
        subscriber.pull(2)


def test_a_generator_in_another_dtype_is_refused(pair):
    _, publishers, _, _ = pair
    with pytest.raises(
        RunError, match=r"w is torch.float32 in the generator and pushed as torch.bfloat16"
    ):
        SharedMemorySubscriber(
            [p.address for p in publishers], [rows(torch.zeros(SHAPE), 0, 6)], reader=0
        )


def hang_in_a_copy(segments: list, copying: Connection) -> None:
    """Begin to copy version 0, and never end."""
    pulled = torch.zeros(SHAPE, dtype=torch.bfloat16)
    subscriber = SharedMemorySubscriber(segments, [rows(pulled, 0, 6)], reader=0)
    subscriber.claim(0)
    copying.send(True)
    time.sleep(600)


def pull(segments: list, version: int, answer: Path) -> None:
    """Save the values of ``version``."""
    pulled = torch.zeros(SHAPE, dtype=torch.bfloat16)
    subscriber = SharedMemorySubscriber(segments, [rows(pulled, 0, 6)], reader=0)
    subscriber.pull(version)
    torch.save(pulled, answer)


def save_address(path: Path) -> None:
    """Publish, save the address, and end."""
    publisher = SharedMemoryPublisher([rows(torch.zeros(SHAPE), 0, 6)], torch.bfloat16)
    torch.save(publisher.address, path)


def in_a_process(function, *args) -> None:
    process = FORK.Process(target=function, args=args)
    process.start()
    process.join(120)
    assert process.exitcode == 0


def test_another_process_reads_the_memory_which_has_no_name(pair, tmp_path):
    trained, publishers, _, _ = pair
    publish(publishers, 0)
    in_a_process(pull, [p.address for p in publishers], 0, tmp_path / "pulled.pt")
    assert torch.equal(torch.load(tmp_path / "pulled.pt"), trained.to(torch.bfloat16))
    assert "/memfd:tiller-weights (deleted)" in Path("/proc/self/maps").read_text()


def test_a_reader_killed_within_a_copy_does_not_block_the_writer(pair, tmp_path):
    _, publishers, _, subscriber = pair
    publish(publishers, 0)
    publish(publishers, 1)
    children = multiprocessing.get_context("fork")  # stay until this process has waited for them
    copying, of_reader = children.Pipe(duplex=False)
    segments = [p.address for p in publishers]
    process = children.Process(target=hang_in_a_copy, args=(segments, of_reader), daemon=True)
    process.start()
    assert copying.poll(60) and copying.recv()
    publishers[0]._patience = 0.2
    with pytest.raises(RunError, match="has been copying version 0"):
        publishers[0].write(2)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, but not yet reaped
    publishers[0]._patience = 5.0
    publish(publishers, 2)
    assert subscriber.pull(2) == 2
    process.join()


def test_the_memory_of_a_trainer_that_ended_is_refused(tmp_path):
    in_a_process(save_address, tmp_path / "segment.pt")
    segment = torch.load(tmp_path / "segment.pt", weights_only=False)
    with pytest.raises(RunError, match=f"trainer rank 0, process {segment.pid}, has ended"):
        SharedMemorySubscriber(
            [segment], [rows(torch.zeros(SHAPE, dtype=torch.bfloat16), 0, 6)], reader=0
        )
