"""500 versions at full speed to three readers with a kill: nothing torn, stale or left."""

import asyncio
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from rl.model.shards import Box, Region, Shard
from rl.weights import shared_memory
from rl.weights.shared_memory import Segment, SharedMemoryPublisher, SharedMemorySubscriber
from rl.weights.transport import Transfer
from tests.warm import FORK

VERSIONS = 500
RANKS = 2
SHAPES = {"rows": (256, 512), "stack": (4, 64, 128), "norm": (1000,)}
DTYPE = torch.bfloat16
DEADLINE_S = 90.0
TRANSFER = Transfer("shared_memory", DTYPE, (), ())
READERS = [(0, 0.0), (1, 0.0002), (3, 0.001)]  # versions late; seconds from one slice to the next
# indices on the board, an array of all processes; READY is the first of one flag for each reader
ANNOUNCED = 0
COPYING = 1
READY = 2
# versions
ALL_READY_BY = 10
RESPAWNED_BY = 250
DIES_AT = 100

Board = Any


def weights_of(version: int) -> dict[str, torch.Tensor]:
    """Return weights, exact in bfloat16; every element changes with the version."""
    return {
        name: ((torch.arange(torch.Size(shape).numel()) * 31 + version * 7) % 256)
        .view(shape)
        .float()
        for name, shape in SHAPES.items()
    }


def shard(name: str, tensor: torch.Tensor, rank: int | None) -> Shard:
    """Return the share of ``rank`` of the first dimension; all of it for None."""
    whole = Box.whole(SHAPES[name])
    size = SHAPES[name][0] // RANKS
    box = whole if rank is None else whole.slab(0, rank * size, size)
    return Shard(Region(name, SHAPES[name], box), tensor[box.slices_in(whole)])


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.0002)


def write(board: Board, addresses: Connection) -> None:
    """Publish all versions; the weights change right after each publish."""
    asyncio.run(_write(board, addresses))


async def _write(board: Board, addresses: Connection) -> None:
    weights = weights_of(-1)
    publishers = [
        SharedMemoryPublisher([shard(*each, rank) for each in weights.items()], TRANSFER, rank=rank)
        for rank in range(RANKS)
    ]
    addresses.send([publisher.address for publisher in publishers])
    for version in range(VERSIONS):
        if version in (ALL_READY_BY, RESPAWNED_BY):
            readers = 3 if version == ALL_READY_BY else 4
            wait_until(lambda readers=readers: all(board[READY : READY + readers]))
        for name, values in weights_of(version).items():
            weights[name].copy_(values)
        await asyncio.gather(*(publisher.publish(version) for publisher in publishers))
        board[ANNOUNCED] = version


def read(
    board: Board,
    segments: list[Segment],
    number: int,
    late: int,
    pause_s: float,
    answers: Connection,
) -> None:
    """Pull the version announced ``late`` versions ago, or the newest if it is gone instead.

    Copies have pauses of ``pause_s``. Sends the number of pulls to ``answers``.
    """

    def copy_with_pauses(pairs, like) -> None:
        for destination, source in pairs:
            destination.copy_(source)
            time.sleep(pause_s)

    pulled, subscriber = open_reader(board, segments, number)
    shared_memory.copy_all = copy_with_pauses
    held = -1
    pulls = 0
    while held < VERSIONS - 1:
        wait_until(lambda held=held: board[ANNOUNCED] > held)
        asked = max(held + 1, board[ANNOUNCED] - late)
        held = subscriber.pull(asked)
        assert held >= asked, f"asked for {asked}, got {held}"
        for name, values in weights_of(held).items():
            wrong = int((pulled[name] != values).sum())
            assert not wrong, f"{wrong} elements of {name} are not those of version {held}"
        pulls = pulls + 1
    answers.send(pulls)


def hang(board: Board, segments: list[Segment], number: int) -> None:
    """Begin to copy, then hang."""
    _, subscriber = open_reader(board, segments, number)
    wait_until(lambda: board[ANNOUNCED] >= DIES_AT)
    while not (claimed := subscriber.claim(board[ANNOUNCED])):
        pass
    destination, source = subscriber._copies[claimed[0]][0]
    destination.copy_(source)
    board[COPYING] = 1
    time.sleep(DEADLINE_S)


def open_reader(
    board: Board, segments: list[Segment], number: int
) -> tuple[dict[str, torch.Tensor], SharedMemorySubscriber]:
    pulled = {name: torch.zeros(shape, dtype=DTYPE) for name, shape in SHAPES.items()}
    shards = [shard(name, tensor, None) for name, tensor in pulled.items()]
    subscriber = SharedMemorySubscriber(segments, shards, TRANSFER, rank=number)
    board[READY + number] = 1
    return pulled, subscriber


def test_readers_of_any_speed_see_whole_increasing_versions_despite_a_kill():
    def start(function, *args):
        process = FORK.Process(target=function, args=args, daemon=True)
        process.start()
        return process

    def holders(inodes: set[str]) -> set[int]:
        """Return the processes that map memory with one of these inodes."""
        found = set()
        for process in Path("/proc").glob("[0-9]*"):
            try:
                lines = (process / "maps").read_text().splitlines()
            except OSError:  # the process ended meanwhile
                continue
            if inodes & {line.split()[4] for line in lines if "/memfd:tiller" in line}:
                found.add(int(process.name))
        return found

    board = FORK.RawArray("q", 8)
    board[ANNOUNCED] = -1
    addresses, of_writer = FORK.Pipe(duplex=False)
    answers, of_reader = FORK.Pipe(duplex=False)
    processes = [start(write, board, of_writer)]
    try:
        assert addresses.poll(DEADLINE_S)
        segments = addresses.recv()
        paths = [f"/proc/{each.pid}/fd/{fd}" for each in segments for fd in each.fds]
        memory = {str(os.stat(path).st_ino) for path in paths}
        processes += [start(read, board, segments, n, *READERS[n], of_reader) for n in (0, 1)]
        victim = start(hang, board, segments, 2)
        processes.append(victim)
        wait_until(lambda: bool(board[COPYING]))
        assert holders(memory) == {process.pid for process in processes}
        victim.kill()
        victim.join(DEADLINE_S)
        processes[-1] = start(read, board, segments, 3, *READERS[2], of_reader)
        for process in processes:
            process.join(DEADLINE_S)
        assert [process.exitcode for process in processes] == [0] * 4
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert board[ANNOUNCED] == VERSIONS - 1
    assert min(answers.recv() for _ in range(3)) > 20
    assert not holders(memory)
