"""The push through Monarch's buffers: between real processes, and when some of them are gone."""

import asyncio
import os
import signal
import time

import monarch.actor
import pytest
import torch
from monarch.actor import ActorError

from rl.launch.local import spawn_procs
from rl.weights.rdma import FIRST_CHUNK, chunks_of
from tests.weights.ranks import GeneratorRank, TrainerRank, call, check_pushes


@pytest.fixture
def with_procs(tmp_path):
    """Runs ``work(spawn)``; ``spawn(name)`` gives a mesh of two processes, and all of them end with it."""

    def run(work):
        async def started():
            meshes = []

            def spawn(name):
                meshes.append(spawn_procs(name, 2, env={}, logs=tmp_path))
                return meshes[-1]

            try:
                await work(spawn)
            finally:
                for mesh in meshes:
                    await stop(mesh)

        asyncio.run(started())

    return run


async def stop(mesh):
    async def stopped():
        await mesh.stop()

    try:
        await asyncio.wait_for(stopped(), 20)
    except Exception as error:
        print(f"{mesh}: {error}")  # a mesh that has failed


def test_every_version_arrives_bit_for_bit(with_procs):
    with_procs(lambda spawn: check_pushes(spawn("trainer"), spawn("generator"), "rdma", range(5)))


def test_a_killed_reader_holds_nobody_up_and_its_successor_takes_the_whole_version(with_procs, monkeypatch):
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", lambda failure: None)

    async def work(spawn):
        publishers = spawn("trainer").spawn("publishers", TrainerRank, "rdma", {"delta": True, "patience": 0.1})
        addresses = await call(publishers.open)
        readers = spawn("generator").spawn("readers", GeneratorRank, "rdma", {"delta": True})
        await call(readers.connect, addresses)
        await call(publishers.publish, 0)
        assert await call(readers.pull, 0) == [(True, 0)] * 2
        for pid in await call(readers.pid):
            os.kill(pid, signal.SIGKILL)
        for version in (1, 2, 3):
            await call(publishers.publish, version)
        readers = spawn("successor").spawn("readers", GeneratorRank, "rdma", {"delta": True})
        await call(readers.connect, addresses)
        with pytest.raises(ActorError, match="fetch of version 1: trainer rank 0 holds 2 and 3"):
            await call(readers.pull, 1)
        assert await call(readers.pull, 3) == [(True, 0)] * 2
        await call(publishers.publish, 5)
        assert await call(readers.pull, 5) == [(True, 0)] * 2
        await call(publishers.close)
        start = time.monotonic()
        with pytest.raises(ActorError, match="not found"):
            await call(readers.pull, 5)
        assert time.monotonic() - start < 30

    with_procs(work)


@pytest.mark.parametrize("used", [1, FIRST_CHUNK, FIRST_CHUNK + 1, 700_001, 1_000_000])
def test_little_more_than_a_delta_is_read(used):
    area = torch.arange(1_000_000).to(torch.uint8)
    assert torch.equal(torch.cat(chunks_of(area)), area)
    chunks = chunks_of(area, used)
    read = sum(map(len, chunks))
    assert used <= read <= max(used * 1.25, used + FIRST_CHUNK)
    assert torch.equal(torch.cat(chunks), area[:read])
