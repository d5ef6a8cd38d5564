"""Processes for a test, which end with it."""

import asyncio

import monarch.actor
import pytest

from rl.launch.local import spawn_procs


@pytest.fixture
def with_procs(tmp_path):
    """Runs ``work(spawn)``, where ``spawn(name)`` gives a mesh of processes. All end with it."""

    # Never taken back: Monarch hears of a death seconds later, and would interrupt the test that runs then.
    monarch.actor.unhandled_fault_hook = lambda failure: None

    def run(work):
        async def started():
            meshes = []

            def spawn(name, ranks=2):
                meshes.append(spawn_procs(name, ranks, env={}, logs=tmp_path))
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
