"""Deaths of actors that Monarch reports: seconds late, but on every host."""

import asyncio
from collections.abc import Callable

import monarch.actor
from monarch.actor import MeshFailure

from rl.actors.hosts import Hosts
from rl.compat.monarch_internals import failed_rank


class Supervisor:
    """Reports the rank and the reason of each death to the owner of the mesh on ``hosts``."""

    def __init__(self, hosts: Hosts):
        self.hosts = hosts
        self._died: dict[str, Callable[[int, str], None]] = {}
        monarch.actor.unhandled_fault_hook = self._on_fault

    def register(self, mesh: str, died: Callable[[int, str], None]) -> None:
        """Call ``died(rank, reason)`` at least once for each death of an actor in the mesh."""
        self._loop = asyncio.get_running_loop()
        self._died[mesh] = died

    def forget(self, mesh: str) -> None:
        """Ignore later deaths in this mesh."""
        self._died.pop(mesh, None)

    def _on_fault(self, failure: MeshFailure) -> None:
        # Monarch calls this on its own thread, also for its helper actors and long after a stop.
        died = self._died.get(failure.mesh_name.rpartition("-")[0])
        if died is not None:
            self._loop.call_soon_threadsafe(died, *failed_rank(failure))
