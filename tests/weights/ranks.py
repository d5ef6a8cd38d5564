"""Trainer ranks and generator ranks of a push as real actors.

The weights of a version are a function of its number.
"""

import asyncio
import importlib
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from monarch.actor import Actor, ActorError, ProcMesh, current_rank, endpoint

from rl.weights.transport import Sent
from tests.weights.network import Weights, change, live_parts, same, trainer_parts, transfer

DEADLINE = 120.0  # including concurrent imports of several processes
SHAPES = {"rows": (256, 300), "columns": (64, 5000), "norm": (128,), "scale": (70,)}


def weights_of(version: int) -> Weights:
    """Return the weights of ``version``. Even versions are new; odd ones change few elements."""
    generator = torch.Generator().manual_seed(version // 2)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    if version % 2:
        change(weights, 0.001, seed=version)
    return weights


def of_transport(transport: str, end: str) -> Any:
    """Return the class of an end of the push: "Publisher" or "Subscriber"."""
    module = importlib.import_module(f"rl.weights.{transport}")
    return getattr(module, f"{transport.title()}{end}")


class TrainerRank(Actor):
    def __init__(self, transport: str, timeout_s: float):
        self.weights = weights_of(0)
        rank = current_rank().rank
        self.make = lambda: of_transport(transport, "Publisher")(
            trainer_parts(self.weights, rank),
            transfer(SHAPES, delta=True, timeout_s=timeout_s),
            rank=rank,
        )

    @endpoint
    async def open(self) -> Any:
        self.publisher = self.make()
        return self.publisher.address

    @endpoint
    async def publish(self, version: int) -> Sent:
        for name, values in weights_of(version).items():
            self.weights[name].copy_(values)
        return await self.publisher.publish(version)

    @endpoint
    async def close(self) -> None:
        self.publisher.close()


class GeneratorRank(Actor):
    def __init__(self, transport: str):
        self.transport = transport
        self.rank = current_rank().rank

    @endpoint
    async def connect(self, addresses: list[Any]) -> None:
        self.shards = live_parts(self.rank, SHAPES)
        self.subscriber = of_transport(self.transport, "Subscriber")(
            addresses, self.shards, transfer(SHAPES, delta=True), rank=self.rank
        )

    @endpoint
    async def pull(self, version: int) -> tuple[bool, int]:
        """Return whether the parameters are those of ``version``, and the number of deltas read."""
        deltas = []
        read = self.subscriber._read

        async def noted(reads: list[Any]) -> None:
            deltas.extend(r for r in reads if r.delta)
            await read(reads)

        self.subscriber._read = noted
        try:
            await self.subscriber.fetch(version)
        finally:
            self.subscriber._read = read
        held = self.subscriber.pull(version)
        return same(self.shards, weights_of(held), self.rank), len(deltas)

    @endpoint
    async def be_patient(self, seconds: float) -> None:
        """Set the timeout_s of a fetch."""
        self.subscriber._timeout_s = seconds

    @endpoint
    async def pid(self) -> int:
        return os.getpid()


async def call(endpoint: Any, *args: Any) -> list[Any]:
    """Return the answers of all ranks, in their order."""

    async def answers() -> Any:
        return await endpoint.call(*args)

    return [value for _, value in await asyncio.wait_for(answers(), DEADLINE)]


async def check_pushes(
    trainer: ProcMesh, generator: ProcMesh, transport: str, versions: range
) -> None:
    """Check that every version arrives bit for bit on every rank, as a delta if it is close."""
    publishers = trainer.spawn("publishers", TrainerRank, transport, 3600.0)
    readers = generator.spawn("readers", GeneratorRank, transport)
    await call(readers.connect, await call(publishers.open))
    for version in versions:
        sent = await call(publishers.publish, version)
        pulled = await call(readers.pull, version)
        near = version % 2 and version > versions.start
        assert all(same for same, _ in pulled), f"version {version}: {pulled}"
        assert [deltas > 0 for _, deltas in pulled] == [bool(near)] * len(pulled)
        assert all((s.bytes_sent < s.bytes_full / 10) == bool(near) for s in sent)


async def check_a_killed_reader(
    spawn: Callable[[str], ProcMesh], transport: str
) -> tuple[Any, Any]:
    """Kill and replace both ranks of a generator; return the publishers and the new readers."""
    publishers = spawn("trainer").spawn("publishers", TrainerRank, transport, 0.1)
    addresses = await call(publishers.open)
    readers = spawn("generator").spawn("readers", GeneratorRank, transport)
    await call(readers.connect, addresses)
    with pytest.raises(ActorError, match="fetch of version 0: trainer rank 0 holds nothing"):
        await call(readers.pull, 0)
    await call(publishers.publish, 0)
    assert await call(readers.pull, 0) == [(True, 0)] * 2
    for pid in await call(readers.pid):
        os.kill(pid, signal.SIGKILL)
    for version in (1, 2, 3):
        await call(publishers.publish, version)
    readers = spawn("successor").spawn("readers", GeneratorRank, transport)
    await call(readers.connect, addresses)
    with pytest.raises(ActorError, match="fetch of version 1: trainer rank 0 holds 2 and 3"):
        await call(readers.pull, 1)
    assert await call(readers.pull, 3) == [(True, 0)] * 2
    await call(publishers.publish, 5)
    assert await call(readers.pull, 5) == [(True, 0)] * 2
    return publishers, readers
