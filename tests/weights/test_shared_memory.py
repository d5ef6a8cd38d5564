"""The push on one host gives whole versions or an error and reuses no slot under a reader."""

import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from rl.errors import RunError
from rl.host.platform import memory_domain
from rl.model.shards import Box, Region, Shard
from rl.weights import shared_memory
from rl.weights.shared_memory import SharedMemoryPublisher, SharedMemorySubscriber
from rl.weights.transport import Transfer
from tests.warm import FORK

SHAPE = (6, 4)
DTYPE = torch.bfloat16


def moved(dtype: torch.dtype = DTYPE, **options) -> Transfer:
    return Transfer("shared_memory", dtype, (), (), **options)


def rows(tensor: torch.Tensor, start: int, stop: int) -> Shard:
    return Shard(Region("w", SHAPE, Box((start, 0), (stop - start, SHAPE[1]))), tensor[start:stop])


def writer(trained: torch.Tensor, start: int = 0, stop: int = 6) -> SharedMemoryPublisher:
    return SharedMemoryPublisher([rows(trained, start, stop)], moved(), rank=0)


def reader(
    segments: list, pulled: torch.Tensor, start: int = 0, stop: int = 6
) -> SharedMemorySubscriber:
    return SharedMemorySubscriber(segments, [rows(pulled, start, stop)], moved(), rank=0)


@pytest.fixture
def pair():
    """Return two trainer ranks with three rows each and a reader of rows 2 to 4 in bfloat16."""
    trained = torch.randn(SHAPE)
    publishers = [writer(trained, start, start + 3) for start in (0, 3)]
    pulled = torch.zeros(SHAPE, dtype=DTYPE)
    return trained, publishers, pulled, reader([p.address for p in publishers], pulled, 2, 5)


def publish(publishers: list[SharedMemoryPublisher], *versions: int) -> None:
    for version in versions:
        for publisher in publishers:
            publisher.write(version)


def test_each_version_arrives_cast_and_whole_as_it_was_when_published(pair):
    """Versions go back after a checkpoint is loaded."""
    trained, publishers, pulled, subscriber = pair
    for version in (0, 1, 6, 7, 4, 5):
        trained.add_(1.0)
        publish(publishers, version)
        expected = trained[2:5].to(DTYPE)
        trained.mul_(-1.0)
        assert subscriber.pull(version) == version
        assert torch.equal(pulled[2:5], expected)
    assert subscriber.pull(4) == 4
    assert not pulled[:2].any()


def test_a_version_that_some_rank_lacks_is_refused(pair):
    """The last one is that of a writer that died within the write."""
    _, publishers, pulled, subscriber = pair

    def refused(version: int, *held: str) -> None:
        said = "; ".join(f"trainer rank {rank} holds {each}" for rank, each in enumerate(held))
        with pytest.raises(RunError) as error:
            subscriber.pull(version)
        assert str(error.value) == f"pull of version {version}: {said}"

    refused(0, "nothing", "nothing")
    publishers[0].write(0)
    refused(0, "[0]", "nothing")
    publish(publishers, 1)
    refused(2, "[0, 1]", "[1]")
    publish(publishers, 2)
    publishers[1]._tensors = [torch.zeros(3, 3, 3, 4)]  # does not fit: the copy raises
    with pytest.raises(RuntimeError):
        publishers[1].write(3)
    publishers[0].write(3)
    refused(3, "[2, 3]", "[2]")
    assert not pulled.any()


def test_a_pull_of_a_replaced_version_takes_the_newest_that_all_ranks_hold(pair):
    trained, publishers, pulled, subscriber = pair
    for version in range(4):
        trained.add_(1.0)
        publish(publishers, version)
    expected = trained[2:5].to(DTYPE)
    trained.add_(1.0)
    publishers[0].write(4)  # rank 1 does not have version 4 yet
    assert subscriber.pull(1) == 3
    assert torch.equal(pulled[2:5], expected)


def test_a_slot_rewritten_before_it_is_locked_is_not_read(pair, monkeypatch):
    trained, publishers, pulled, subscriber = pair
    publish(publishers, 0)
    trained.add_(1.0)
    publishers[0].write(1)
    expected = trained[2:5].to(DTYPE)
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
    pulled = torch.zeros(SHAPE, dtype=DTYPE)
    publisher = writer(torch.ones(SHAPE))
    subscriber = reader([publisher.address], pulled)

    def writing():
        """Write versions 2 and 3 with a pause within each write, and after the last."""
        for version in (2, 3):
            with publisher._claimed(version) as slot:
                yield
                slot.views[0].fill_(version)
                slot.version = version
        yield

    publish([publisher], 0, 1)
    steps = writing()
    next(steps)
    looks = 0

    def version_of(slot):
        nonlocal looks
        seen = int(slot.header[0]) - 1
        if slot not in publisher._slots:
            looks += 1
            if looks > 2:  # the first two find that version 0 is gone
                next(steps, None)
        return seen

    monkeypatch.setattr(
        shared_memory._Slot, "version", property(version_of, shared_memory._Slot.version.fset)
    )
    monkeypatch.setattr(shared_memory.time, "sleep", lambda _: next(steps, None))
    version = subscriber.pull(0)
    assert version in (2, 3)
    assert (pulled == version).all()


def hang_in_a_copy(segments: list, copying: Connection) -> None:
    """Begin to copy version 0, and never end."""
    reader(segments, torch.zeros(SHAPE, dtype=DTYPE)).claim(0)
    copying.send(True)
    time.sleep(600)


def test_a_slot_is_not_reused_under_a_reader_until_the_reader_is_killed(pair):
    trained, publishers, pulled, subscriber = pair
    publish(publishers, 0, 1)
    children = multiprocessing.get_context("fork")  # stay until this process has waited for them
    copying, of_reader = children.Pipe(duplex=False)
    segments = [p.address for p in publishers]
    process = children.Process(target=hang_in_a_copy, args=(segments, of_reader), daemon=True)
    process.start()
    assert copying.poll(60) and copying.recv()
    publishers[0]._timeout_s = 0.2
    held = "publish of version 2: a generator rank has been copying version 0 for"
    with pytest.raises(RunError, match=held):
        publishers[0].write(2)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, but not yet reaped
    publishers[0]._timeout_s = 5.0
    publish(publishers, 2)
    assert subscriber.pull(2) == 2
    assert torch.equal(pulled[2:5], trained[2:5].to(DTYPE))
    process.join()


def pull(segments: list, answer: Path) -> None:
    """Save the values of version 0."""
    pulled = torch.zeros(SHAPE, dtype=DTYPE)
    reader(segments, pulled).pull(0)
    torch.save(pulled, answer)


def save_address(path: Path) -> None:
    """Publish, save the address, and end."""
    torch.save(writer(torch.zeros(SHAPE)).address, path)


def in_a_process(function, *args) -> None:
    process = FORK.Process(target=function, args=args)
    process.start()
    process.join(120)
    assert process.exitcode == 0


def test_another_process_reads_the_memory_which_has_no_name(pair, tmp_path):
    trained, publishers, _, _ = pair
    publish(publishers, 0)
    in_a_process(pull, [p.address for p in publishers], tmp_path / "pulled.pt")
    assert torch.equal(torch.load(tmp_path / "pulled.pt"), trained.to(DTYPE))
    assert "/memfd:tiller-weights (deleted)" in Path("/proc/self/maps").read_text()


def test_memory_of_a_trainer_that_ended_or_is_on_another_host_is_refused(tmp_path, monkeypatch):
    pulled = torch.zeros(SHAPE, dtype=DTYPE)
    in_a_process(save_address, tmp_path / "segment.pt")
    segment = torch.load(tmp_path / "segment.pt", weights_only=False)
    with pytest.raises(RunError, match=f"trainer rank 0, process {segment.pid}, has ended"):
        reader([segment], pulled)
    here = memory_domain()
    monkeypatch.setattr(shared_memory, "memory_domain", lambda: "elsewhere")
    wrong = rf"runs in \['{here}'\], the generator in elsewhere.*set weights.transport to 'rdma'"
    with pytest.raises(RunError, match=wrong):
        reader([segment], pulled)
