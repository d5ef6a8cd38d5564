"""What Monarch says of actors that died: seconds late, but of any host."""

import asyncio
from collections.abc import Callable

import monarch.actor
from monarch.actor import MeshFailure

from rl.actors.hosts import Hosts
from rl.compat.monarch_internals import failed_rank


class Supervisor:
    """Tells the owners of meshes on ``hosts`` which rank died, and why."""

    def __init__(self, hosts: Hosts):
        self.hosts = hosts
        self._died: dict[str, Callable[[int, str], None]] = {}
        monarch.actor.unhandled_fault_hook = self._on_fault

    def register(self, mesh: str, died: Callable[[int, str], None]) -> None:
        """Call ``died(rank, reason)`` for each death of an actor in the mesh of this name, perhaps
        several times.
        """
        self._loop = asyncio.get_running_loop()
        self._died[mesh] = died

    def forget(self, mesh: str) -> None:
        """From now on a death in this mesh is no failure."""
        self._died.pop(mesh, None)

    def _on_fault(self, failure: MeshFailure) -> None:
        # On a thread of Monarch's; also for the helpers that it runs beside the actors, and long
        # after a stop.
        died = self._died.get(failure.mesh_name.rpartition("-")[0])
        if died is not None:
            self._loop.call_soon_threadsafe(died, *failed_rank(failure))
