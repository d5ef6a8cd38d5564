"""StoreProcess: the process that holds the weights of a push through torchstore."""

import asyncio
import contextlib

from monarch.actor import ProcMesh

from rl.actors.hosts import Hosts
from rl.actors.processes import stop_procs
from rl.types import Place

DEADLINE_S = 10.0


class StoreProcess:
    """A process with torchstore's volume, which every rank of the run finds by name."""

    def __init__(self, procs: ProcMesh):
        self._procs = procs

    @classmethod
    async def start(cls, hosts: Hosts) -> "StoreProcess":
        """Spawn the process on the first host and open an empty store in it."""
        from rl.weights.store import open_store

        procs = hosts.spawn("store", Place(ranks=1), env={})
        await open_store(procs)
        return cls(procs)

    async def stop(self) -> None:
        """End the process and drop its contents; another can be started after it."""
        from rl.weights.store import close_store

        with contextlib.suppress(Exception):  # the process has ended
            async with asyncio.timeout(DEADLINE_S):
                await close_store()
        await stop_procs(self._procs)
