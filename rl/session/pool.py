"""The generators of a session: they start, fail, come back, join and leave while it goes on."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rl.actors.generator import GeneratorMesh
from rl.actors.group import ensure_running
from rl.errors import ActorFailure, RankLost, RunError
from rl.session.concurrency import background
from rl.session.config import SessionConfig
from rl.session.push import WeightPush
from rl.session.router import Router

LOOK_EVERY_S = 1.0


class GeneratorPool:
    """Keeps as many generators at work as are asked for; each holds weights before it is asked. ::

        pool = GeneratorPool(config, make, router, push, folder / "replicas", print)
        await pool.start()                      # processes and engines, without weights
        await pool.connect()                    # they hold the trainer's weights and are asked
        async with background(pool.run()): ...  # lost ones come back, others join and leave

    ``make(number)`` gives the mesh of generator ``number``. A number in the file ``asked`` changes
    how many there are. A generator that is lost more than ``max_restarts`` times without a
    completion in between ends the session, and so does one that raises: it would raise again.
    """

    def __init__(
        self,
        config: SessionConfig,
        make: Callable[[int], GeneratorMesh],
        router: Router,
        push: WeightPush,
        asked: Path,
        say: Callable[[str], None],
    ):
        self._make = make
        self._router = router
        self._push = push
        self._max_restarts = config.max_restarts
        self._asked = asked
        self._say = say
        replicas = config.generator.replicas if config.generator else 0
        self._meshes = {number: make(number) for number in range(replicas)}
        self._leaving: list[GeneratorMesh] = []
        self.restarts = 0
        """Number of times that a generator was started again."""

    @property
    def meshes(self) -> list[GeneratorMesh]:
        """All of them, those that are starting included."""
        return list(self._meshes.values())

    async def start(self) -> None:
        """Start, side by side, every generator that is not running; first stop those that left."""
        while self._leaving:
            await self._stop(self._leaving[0])
        if self._meshes:
            async with self._router.resident(), background() as work:
                for mesh in self.meshes:
                    work.create_task(ensure_running(mesh))

    async def abort(self) -> None:
        """Abort all requests in flight, also those whose caller was cancelled."""
        await self._each(lambda mesh: mesh.abort())

    async def offload(self) -> None:
        """Move all weights to host memory and forget keys and values."""
        await self._each(lambda mesh: mesh.offload())

    async def onload(self, **_: Any) -> None:
        """Bring all weights back."""
        await self._each(lambda mesh: mesh.onload())

    async def _each(self, call: Callable[[GeneratorMesh], Awaitable[None]]) -> None:
        async def unless_lost(mesh: GeneratorMesh) -> None:
            with suppress(RankLost):  # ``run`` starts it again
                await call(mesh)

        await asyncio.gather(*(unless_lost(mesh) for mesh in self.meshes if mesh.is_running))

    async def connect(self) -> str:
        """Bring all generators the trainer's weights and have them asked; return the plan."""
        for mesh in self.meshes:
            self._router.leave(mesh)
        plan = await self._push.connect(self.meshes)
        for mesh in self.meshes:
            self._router.join(mesh)
        return plan

    async def run(self) -> None:
        """Keep as many generators as are asked for at work; raise what cannot be mended."""
        async with background() as work:
            keepers = {
                number: work.create_task(self._keep(mesh)) for number, mesh in self._meshes.items()
            }
            while True:
                await asyncio.sleep(LOOK_EVERY_S)
                count = self._count_asked()
                for number in range(count):
                    if number not in self._meshes:
                        mesh = self._meshes[number] = self._make(number)
                        keepers[number] = work.create_task(self._keep(mesh))
                for number in [number for number in self._meshes if number >= count]:
                    mesh = self._meshes.pop(number)
                    self._leaving.append(mesh)
                    keepers.pop(number).cancel()
                    self._say(f"{mesh.name} leaves")
                    await self._router.drain(mesh)
                    await self._stop(mesh)

    async def close(self) -> None:
        """Let vLLM clean up; a generator that cannot any more has nothing that is still needed."""
        running = [mesh for mesh in (*self.meshes, *self._leaving) if mesh.is_running]
        await asyncio.gather(*(mesh.close() for mesh in running), return_exceptions=True)

    async def stop(self) -> None:
        """End the processes, whatever they are doing."""
        await asyncio.gather(*(mesh.stop() for mesh in (*self.meshes, *self._leaving)))

    async def _keep(self, mesh: GeneratorMesh) -> None:
        """Start the generator again whenever it is lost. Raises RunError if that is no use."""
        lost = 0
        while True:
            failure = await self._work(mesh)
            lost = 1 if self._router.served.pop(mesh, 0) else lost + 1
            self._router.leave(mesh)
            self._push.remove(mesh)
            if not isinstance(failure, RankLost):
                raise failure
            if lost > self._max_restarts:
                raise RunError(
                    f"{failure}\nthat was the {lost}th time without a completion in between"
                ) from failure
            self.restarts += 1
            self._say(f"{str(failure).splitlines()[0]}; starting it again")

    async def _work(self, mesh: GeneratorMesh) -> ActorFailure:
        """Have the generator join if it has not; return how it fails."""
        try:
            if mesh not in self._router.replicas:
                async with self._router.resident():
                    await ensure_running(mesh)
                await self._push.join(mesh)
                self._router.join(mesh)
                self._say(f"{mesh.name} has joined")
        except ActorFailure as failure:
            return failure
        return await mesh.failed()

    async def _stop(self, mesh: GeneratorMesh) -> None:
        """End a generator that leaves; it is among ``_leaving`` until its processes end."""
        self._router.leave(mesh)
        self._push.remove(mesh)
        await mesh.stop()
        self._leaving.remove(mesh)

    def _count_asked(self) -> int:
        """Return the number in the file if it makes sense, else as many as there are."""
        try:
            count = int(self._asked.read_text())
        except (OSError, ValueError):  # no such file, or one half written
            return len(self._meshes)
        return min(count, self._push.max_generators) if count > 0 else len(self._meshes)
