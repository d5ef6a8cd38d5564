"""Processes of the stress test: a trainer that publishes at full speed, and its readers.

The board is a file that all processes map: the newest version that all trainer ranks hold, then a
flag for each event.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing.connection import Connection

import torch

from rl.model.shards import Box, Region, Shard
from rl.weights import shared_memory
from rl.weights.shared_memory import Segment, SharedMemoryPublisher, SharedMemorySubscriber
from rl.weights.transport import Transfer

VERSIONS = 500
RANKS = 2
SHAPES = {"rows": (256, 512), "stack": (4, 64, 128), "norm": (1000,)}
DTYPE = torch.bfloat16
DEADLINE_S = 90.0
TRANSFER = Transfer("shared_memory", DTYPE, (), ())

# indices on the board; READY is the first of one flag for each reader
ANNOUNCED = 0
COPYING = 1
READY = 2
# versions
ALL_READY_BY = 10
RESPAWNED_BY = 250
DIES_AT = 100


def open_board(path: str) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=16, dtype=torch.int64)


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


def write(board_path: str, addresses: Connection) -> None:
    """Publish all versions; the weights change right after each publish."""
    asyncio.run(_write(open_board(board_path), addresses))


async def _write(board: torch.Tensor, addresses: Connection) -> None:
    weights = weights_of(-1)
    shares = [
        [shard(name, tensor, rank) for name, tensor in weights.items()] for rank in range(RANKS)
    ]
    publishers = [SharedMemoryPublisher(each, TRANSFER, rank=i) for i, each in enumerate(shares)]
    addresses.send([publisher.address for publisher in publishers])
    for version in range(VERSIONS):
        if version in (ALL_READY_BY, RESPAWNED_BY):
            readers = 3 if version == ALL_READY_BY else 4
            wait_until(lambda readers=readers: bool(board[READY : READY + readers].all()))
        for name, values in weights_of(version).items():
            weights[name].copy_(values)
        await asyncio.gather(*(publisher.publish(version) for publisher in publishers))
        board[ANNOUNCED] = version


def read(
    board_path: str,
    segments: list[Segment],
    number: int,
    late: int,
    pause_s: float,
    answers: Connection,
) -> None:
    """Pull the version announced ``late`` versions ago, or the newest if it is gone instead.

    Copies have pauses of ``pause_s``. Sends the number of pulls to ``answers``.
    """
    board, pulled, subscriber = open_reader(board_path, segments, number)
    shared_memory.copy_all = partial(copy_with_pauses, pause_s)
    held = -1
    pulls = 0
    while held < VERSIONS - 1:
        wait_until(lambda held=held: int(board[ANNOUNCED]) > held)
        asked = max(held + 1, int(board[ANNOUNCED]) - late)
        brought = subscriber.pull(asked)
        assert brought >= asked, f"asked for {asked}, got {brought}"
        for name, values in weights_of(brought).items():
            wrong = int((pulled[name] != values).sum())
            assert not wrong, f"{wrong} elements of {name} are not those of version {brought}"
        held = brought
        pulls = pulls + 1
    answers.send(pulls)


def copy_with_pauses(
    pause_s: float, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], like: torch.Tensor
) -> None:
    for destination, source in pairs:
        destination.copy_(source)
        time.sleep(pause_s)


def hang(board_path: str, segments: list[Segment], number: int) -> None:
    """Begin to copy, then hang."""
    board, _, subscriber = open_reader(board_path, segments, number)
    wait_until(lambda: int(board[ANNOUNCED]) >= DIES_AT)
    while not (claimed := subscriber.claim(int(board[ANNOUNCED]))):
        pass
    destination, source = subscriber._copies[claimed[0]][0]
    destination.copy_(source)
    board[COPYING] = 1
    time.sleep(DEADLINE_S)


def open_reader(
    board_path: str, segments: list[Segment], number: int
) -> tuple[torch.Tensor, dict[str, torch.Tensor], SharedMemorySubscriber]:
    board = open_board(board_path)
    pulled = {name: torch.zeros(shape, dtype=DTYPE) for name, shape in SHAPES.items()}
    shards = [shard(name, tensor, None) for name, tensor in pulled.items()]
    subscriber = SharedMemorySubscriber(segments, shards, TRANSFER, rank=number)
    board[READY + number] = 1
    return board, pulled, subscriber


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.0002)
