"""The generators of a run: they start, fail, come back, join and leave while it goes on."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from pathlib import Path

from rl.actors.generator import GeneratorMesh
from rl.actors.group import ensure_running
from rl.config import RLConfig
from rl.controller.concurrency import background
from rl.controller.push import WeightPush
from rl.controller.router import Router, Turn
from rl.errors import ActorFailure, RunError

LOOK_EVERY_S = 1.0


class Fleet:
    """Keeps as many generators at work as are asked for; each holds weights before it is sent
    requests. ::

        fleet = Fleet(config, make, router, push, folder / "replicas", print)
        await fleet.start()                     # processes and engines, without weights
        await fleet.connect(step)               # they hold the trainer's weights and are asked
        async with background(fleet.run()): ...     # lost ones come back, others join and leave

    ``make(number)`` gives the mesh of generator ``number``. Whoever writes a number to the file
    ``asked`` changes how many there are. A generator that is lost more than ``max_restarts`` times
    without a completion in between ends the run, and so does one that raises: it would raise again.
    """

    def __init__(
        self,
        config: RLConfig,
        make: Callable[[int], GeneratorMesh],
        router: Router,
        push: WeightPush,
        asked: Path,
        say: Callable[[str], None],
        turn: Turn = nullcontext,
    ):
        self._make = make
        self._router = router
        self._push = push
        self._max_restarts = config.max_restarts
        self._asked = asked
        self._say = say
        self._turn = turn
        self._meshes = {number: make(number) for number in range(config.generator.replicas)}
        self._leaving: list[GeneratorMesh] = []
        self.restarts = 0
        """How often a generator was started again, over the run."""

    @property
    def meshes(self) -> list[GeneratorMesh]:
        """All of them, those that are starting included."""
        return list(self._meshes.values())

    async def start(self) -> None:
        """Start, side by side, every generator that is not running; first stop those that were
        leaving.
        """
        while self._leaving:
            await self._stop(self._leaving[0])
        async with self._turn(), background() as work:
            for mesh in self.meshes:
                work.create_task(ensure_running(mesh))

    async def abort(self) -> None:
        """Abort all requests in flight, also those whose caller was cancelled."""
        await asyncio.gather(
            *(self._unless_lost(mesh.abort) for mesh in self.meshes if mesh.is_running)
        )

    async def offload(self) -> None:
        """Move all weights to host memory; what nobody waits for any more is aborted."""
        await asyncio.gather(
            *(self._unless_lost(mesh.offload) for mesh in self.meshes if mesh.is_running)
        )

    async def onload(self) -> None:
        """Bring them back."""
        await asyncio.gather(
            *(self._unless_lost(mesh.onload) for mesh in self.meshes if mesh.is_running)
        )

    async def _unless_lost(self, call: Callable[[], Awaitable[None]]) -> None:
        try:
            await call()
        except ActorFailure as failure:  # whoever keeps it sees to that
            if not failure.is_lost:
                raise

    async def connect(self, step: int) -> str:
        """Connect all to a trainer that was just started, and bring them its weights; the push's
        plan.
        """
        for mesh in self.meshes:
            self._router.leave(mesh)
        plan = await self._push.connect(self.meshes, step)
        for mesh in self.meshes:
            self._router.join(mesh)
        return plan

    async def run(self) -> None:
        """Keep every generator at work, and as many as are asked for; raises what cannot be
        mended.
        """
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
                    await self._part(mesh)

    async def _keep(self, mesh: GeneratorMesh) -> None:
        """See that it is at work, for ever. Raises RunError where it cannot be."""
        lost = 0
        while True:
            failure = await self._work(mesh)
            lost = 1 if self._router.served.pop(mesh, 0) else lost + 1
            self._router.leave(mesh)
            self._push.remove(mesh)
            if not failure.is_lost:
                raise failure
            if lost > self._max_restarts:
                raise RunError(
                    f"{failure}\nthat was the {lost}th time without a completion in between"
                ) from failure
            self.restarts += 1
            self._say(f"{str(failure).splitlines()[0]}; starting it again")

    async def _work(self, mesh: GeneratorMesh) -> ActorFailure:
        """Have it join where it has not, and see how it fails."""
        try:
            if mesh not in self._router.replicas:
                async with self._turn():
                    await ensure_running(mesh)
                await self._push.join(mesh)
                self._router.join(mesh)
                self._say(f"{mesh.name} has joined")
        except ActorFailure as failure:
            return failure
        return await mesh.failed()

    async def _part(self, mesh: GeneratorMesh) -> None:
        """Have it finish what it has in flight, then end it."""
        await self._router.drain(mesh)
        await self._stop(mesh)

    async def _stop(self, mesh: GeneratorMesh) -> None:
        """End a generator that leaves; it stays among ``_leaving`` until its processes have
        ended.
        """
        self._router.leave(mesh)
        self._push.remove(mesh)
        await mesh.stop()
        self._leaving.remove(mesh)

    def _count_asked(self) -> int:
        """The number in the file, where there is one that makes sense; else as many as
        there are.
        """
        try:
            count = int(self._asked.read_text())
        except (OSError, ValueError):  # no such file, or one half written
            return len(self._meshes)
        return min(count, self._push.most) if count > 0 else len(self._meshes)
