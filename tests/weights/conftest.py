"""Processes for a test, which end with it."""

import asyncio

import monarch.actor
import pytest

from rl.actors.hosts import Hosts
from rl.types import Place


@pytest.fixture
def with_procs(tmp_path):
    """Runs ``work(spawn)``, where ``spawn(name)`` gives a mesh of processes. All end with it."""

    # Never taken back: Monarch hears of a death seconds later, and would interrupt the test that
    # runs then.
    monarch.actor.unhandled_fault_hook = lambda failure: None

    def run(work):
        async def started():
            meshes = []

            def spawn(name, ranks=2):
                meshes.append(Hosts(tmp_path).spawn(name, Place(ranks=ranks), env={}))
                return meshes[-1]

            try:
                await work(spawn)
            finally:
                await asyncio.gather(*map(stop, meshes))

        asyncio.run(started())

    return run


async def stop(mesh):
    async def stopped():
        await mesh.stop()

    try:
        await asyncio.wait_for(stopped(), 20)
    except Exception as error:
        print(f"{mesh}: {error}")  # a mesh that has failed
