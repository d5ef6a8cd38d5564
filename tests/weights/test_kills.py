"""Many pushes to generators that are killed and started again: none is wrong, and none hangs."""

import asyncio
import os
import random
import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from rl.errors import RunError
from rl.weights import collective, streams, tcp
from rl.weights.transport import open_publisher, open_subscriber
from tests.kit.tables import long
from tests.warm import FORK
from tests.weights.network import RANKS, SHAPES, live_parts, same, trainer_parts, transfer

GENERATORS = 3
KILL_EVERY = 4
WAIT_S = 60.0
TRIES = 3
STALL_S = 2.0


def weights_of(version: int) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, float(version)) for name, shape in SHAPES.items()}


def generate(says: Connection, moved: Any, addresses: list[Any], number: int) -> None:
    """Pull each version that is asked for; answer whether the parameters are those of it."""
    os.environ[streams.HOST] = f"127.0.0.{number + 2}"
    streams.PIECE_BYTES = 64
    collective.STALL_S = tcp.STALL_S = STALL_S
    shards = [live_parts(rank) for rank in range(RANKS)]
    subscribers = [
        open_subscriber(moved, addresses, parts, generator=number, rank=rank)
        for rank, parts in enumerate(shards)
    ]

    async def fetch(version: int) -> None:
        for last in range(TRIES):
            try:
                await asyncio.gather(*(each.fetch(version) for each in subscribers))
                return
            except RunError:  # the session tries again too
                if last == TRIES - 1:
                    raise

    while True:
        version = says.recv()
        asyncio.run(fetch(version))
        for subscriber in subscribers:
            subscriber.pull(version)
        exact = [same(parts, weights_of(version), rank) for rank, parts in enumerate(shards)]
        says.send((version, all(exact)))


@dataclass
class Generator:
    """Process of a generator of two ranks."""

    process: Any
    says: Connection

    @classmethod
    def start(cls, moved: Any, addresses: list[Any], number: int) -> "Generator":
        here, there = FORK.Pipe()
        arguments = there, moved, addresses, number
        process = FORK.Process(target=generate, args=arguments, daemon=True)
        process.start()
        there.close()
        return cls(process, here)

    async def answer(self) -> Any:
        """Return what it says; raises EOFError or OSError if it was killed."""
        return await asyncio.wait_for(asyncio.to_thread(self.says.recv), WAIT_S)

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()


@pytest.mark.parametrize(
    ("transport", "pushes"),
    [
        ("collective", 12),
        long("collective", 200),
        long("tcp", 200),
    ],
)
async def test_no_push_is_wrong_or_hangs_while_generators_are_killed(
    transport, pushes, monkeypatch
):
    monkeypatch.setattr(streams, "PIECE_BYTES", 64)
    monkeypatch.setattr(collective, "STALL_S", STALL_S)
    rng = random.Random(pushes)
    weights = weights_of(0)
    moved = transfer(generators=GENERATORS, timeout_s=WAIT_S, transport=transport)
    publishers = [
        open_publisher(moved, trainer_parts(weights, rank), rank=rank) for rank in range(RANKS)
    ]
    addresses = [publisher.address for publisher in publishers]
    generators = [Generator.start(moved, addresses, number) for number in range(GENERATORS)]
    killed = 0
    try:
        for version in range(pushes):
            for tensor in weights.values():
                tensor.fill_(version)
            for publisher in publishers:
                await asyncio.wait_for(publisher.publish(version), WAIT_S)
            for generator in generators:
                generator.says.send(version)
            victim = None
            if version % KILL_EVERY == KILL_EVERY - 1:
                victim = rng.randrange(GENERATORS)
                await asyncio.sleep(0.01 * rng.random())  # in the middle of its fetch, or after it
                generators[victim].kill()
                killed += 1
                generators[victim] = Generator.start(moved, addresses, victim)
                generators[victim].says.send(version)
            assert [await each.answer() for each in generators] == [(version, True)] * GENERATORS
    finally:
        for generator in generators:
            generator.kill()
        for publisher in publishers:
            publisher.close()
    assert killed == pushes // KILL_EVERY
