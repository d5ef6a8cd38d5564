"""Processes for a test, which end with it."""

import asyncio
import contextlib

import monarch.actor
import pytest

from rl.actors.hosts import Hosts
from rl.types import Place


@pytest.fixture
def procs(tmp_path):
    """Return a context that yields ``spawn(name)``; all meshes end with the context."""

    # not undone: Monarch notices a death seconds later and would interrupt the next test
    monarch.actor.unhandled_fault_hook = lambda failure: None

    @contextlib.asynccontextmanager
    async def started():
        meshes = []

        def spawn(name, ranks=2):
            meshes.append(Hosts(tmp_path).spawn(name, Place(ranks=ranks), env={}))
            return meshes[-1]

        try:
            yield spawn
        finally:
            await asyncio.gather(*map(stop, meshes))

    return started


async def stop(mesh):
    async def stopped():
        await mesh.stop()

    try:
        await asyncio.wait_for(stopped(), 20)
    except Exception as error:
        print(f"{mesh}: {error}")  # the mesh has failed
