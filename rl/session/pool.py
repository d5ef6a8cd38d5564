"""GeneratorPool: starts the generators of a session, restarts lost ones, adds and removes some; and
the judgement of the loss of a rank.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl.actors.generator import GeneratorMesh
from rl.errors import ActorFailure, RankLost, RunError, require_value
from rl.host.disk import write_whole
from rl.observe.events import Events
from rl.session.concurrency import Signal, background, finish_all
from rl.session.placement import Placement
from rl.session.push import UNLIMITED, WeightPush
from rl.session.router import Router
from rl.session.session_config import SessionConfig

LOOK_EVERY_S = 1.0
FIGURES_S = 5.0
"""Time in which a generator has to answer; Prometheus waits 10 s by default."""


@dataclass(eq=False)
class Recovery:
    """Decides which failures of meshes the session survives.

    - A mesh that lost a rank is started again, at most ``max_restarts`` times without progress in
      between.
    - An exception of an actor is final, since it would be raised again.
    """

    max_restarts: int
    events: Events
    restarts: int = field(default=0, init=False)
    """Number of times that a mesh was started again."""
    in_a_row: Counter[str] = field(default_factory=Counter, init=False)
    """Number of losses without progress in between, by generator."""

    def survive(
        self, failure: ActorFailure, then: str, *, progressed: bool, generator: str = ""
    ) -> None:
        """Return if the mesh of ``failure`` is to be started again. ``then`` says what follows.
        ``progressed``: whether there was a completion of ``generator``, or without a name a
        checkpoint of the models, since its last loss.

        Raises ``failure`` otherwise; for a ``generator`` that was lost too often RunError, since no
        checkpoint repairs that.
        """
        lost = self.in_a_row[generator] = 1 if progressed else self.in_a_row[generator] + 1
        if not isinstance(failure, RankLost):
            raise failure
        if lost > self.max_restarts:
            if not generator:
                raise failure
            often = f"it was lost {lost} times without a completion in between"
            raise RunError(f"{failure}\n{often}") from failure
        self.restarts += 1
        text = f"{str(failure).splitlines()[0]}; {then}"
        self.events.emit("lost", process=generator or failure.actor, text=text)


@dataclass(eq=False)
class GeneratorPool:
    """Keeps the requested number of generators running. Each has weights before requests. ::

        pool = GeneratorPool(config, make, router, push, folder / "replicas", events)
        await pool.start()                      # processes and engines, without weights
        await pool.connect()                    # they have the trainer's weights and get requests
        async with background(pool.run()): ...  # lost ones come back, others join and leave

    - ``make(number)`` returns the mesh of generator ``number``.
    - A number in the file ``asked``, which ``ask`` writes, changes the number of generators, up to
      the number that have GPUs of their own and, over a network, up to the number at the start.
    - A generator that is lost more than ``max_restarts`` times without a completion in between ends
      the session. So does a generator that raises, since it would raise again.
    """

    config: SessionConfig
    make: Callable[[int], GeneratorMesh]
    router: Router
    push: WeightPush
    asked: Path
    events: Events

    def __post_init__(self) -> None:
        self.recovery = Recovery(self.config.max_restarts, self.events)
        replicas = self.config.generator.replicas if self.config.generator else 0
        self._meshes = {number: self.make(number) for number in range(replicas)}
        hardware = self.config.hardware
        on_gpus = bool(replicas) and hardware.kind != "cpu"
        self._most = Placement(self.config, hardware.gpus).replicas if on_gpus else UNLIMITED
        self._changed = Signal()

    @property
    def meshes(self) -> list[GeneratorMesh]:
        """All generators, from their start until their processes have ended."""
        return list(self._meshes.values())

    async def start(self) -> None:
        """Start all generators that are not running; first stop generators that leave."""
        leaving = [mesh for mesh in self.meshes if mesh.state == "leaving"]
        await finish_all(mesh.stop() for mesh in leaving)
        for mesh in leaving:
            del self._meshes[mesh.number]
        if self._meshes:
            async with self.router.resident(), background() as work:
                for mesh in self.meshes:
                    work.create_task(self._start(mesh))

    async def abort(self, *request_ids: str) -> None:
        """Abort these requests, or without ids all in flight, also those of cancelled callers."""
        await self._each(lambda mesh: mesh.abort(*request_ids))

    async def offload(self) -> None:
        """Drop all weights, keys and values."""
        await self._each(lambda mesh: mesh.offload())

    async def onload(self, *, model: bool, **_: Any) -> None:
        """Take the memory back. With ``model``, load the weights again unless newer ones came."""
        await self._each(lambda mesh: mesh.onload(model=model))

    async def _each(self, call: Callable[[GeneratorMesh], Awaitable[None]]) -> None:
        async def ask(mesh: GeneratorMesh) -> None:
            with suppress(RankLost):  # it is started again
                await call(mesh)

        await asyncio.gather(*(ask(mesh) for mesh in self.meshes if mesh.is_running))

    async def figures(self) -> dict[str, dict[str, float]]:
        """Return the figures of each generator that runs and answers soon, by its name: see
        :meth:`rl.actors.generator.GeneratorMesh.figures`.
        """

        async def ask(mesh: GeneratorMesh) -> dict[str, float]:
            async with asyncio.timeout(FIGURES_S):
                version = -1 if mesh.version is None else mesh.version
                return {**await mesh.figures(), "policy_version": version}

        running = [mesh for mesh in self.meshes if mesh.is_running]
        answers = await asyncio.gather(*map(ask, running), return_exceptions=True)
        answered = zip(running, answers, strict=True)
        return {
            mesh.name: answer for mesh, answer in answered if not isinstance(answer, BaseException)
        }

    async def connect(self) -> str:
        """Bring all generators the trainer's weights and send them requests; return the plan."""
        plan = await self.push.connect(self._meshes.values())
        for mesh in self.meshes:
            self.router.join(mesh)
        return plan

    async def run(self) -> None:
        """Keep the requested number of generators running. Raises failures that end the session."""
        async with background() as work:
            keepers = {n: work.create_task(self._keep(mesh)) for n, mesh in self._meshes.items()}
            while True:
                await asyncio.sleep(LOOK_EVERY_S)
                count = self.count_asked()
                for number in range(count):
                    if number not in self._meshes:
                        mesh = self._meshes[number] = self.make(number)
                        keepers[number] = work.create_task(self._keep(mesh))
                leaving = [number for number in self._meshes if number >= count]
                await finish_all(
                    self._remove(self._meshes[number], keepers.pop(number)) for number in leaving
                )
                self._changed.notify()

    def ask(self, count: int) -> None:
        """Have ``run`` change the number of generators. Raises ConfigError if it cannot."""
        is_valid = isinstance(count, int) and 1 <= count <= self.most
        require_value(is_valid, "replicas", count, f"1 to {self.most}")
        write_whole(self.asked, lambda file: file.write(b"%d" % count))
        self._changed.notify()

    async def scaled(self) -> None:
        """Wait until the number of generators that is asked for serves, and no other is left."""
        await self._changed.until(
            lambda: (
                len(self._meshes) == self.count_asked()
                and all(mesh.state == "serving" for mesh in self.meshes)
            )
        )

    @property
    def most(self) -> int:
        """Number of generators that there can be."""
        return min(self._most, self.push.max_generators)

    def count_asked(self) -> int:
        """Return the number of generators that the file asks for, or the current number if the file
        holds no valid number.
        """
        try:
            count = int(self.asked.read_text())
        except (OSError, ValueError):  # the file is missing or half written
            return len(self._meshes)
        return min(count, self.most) if count > 0 else len(self._meshes)

    async def close(self) -> None:
        """Let vLLM clean up. Ignores failures."""
        running = [mesh for mesh in self.meshes if mesh.is_running]
        await asyncio.gather(*(mesh.close() for mesh in running), return_exceptions=True)

    async def stop(self) -> None:
        """End the processes, whatever they are doing."""
        await finish_all(mesh.stop() for mesh in self.meshes)

    async def _remove(self, mesh: GeneratorMesh, keeper: "asyncio.Task[None]") -> None:
        """End a generator after its requests."""
        self.events.emit("left", process=mesh.name, text=f"{mesh.name} leaves")
        keeper.cancel()
        await asyncio.wait([keeper])
        await self.router.drain(mesh)
        await mesh.stop()
        del self._meshes[mesh.number]

    async def _keep(self, mesh: GeneratorMesh) -> None:
        """Start the generator, bring it weights, and send it requests, again whenever it is lost.
        Raises failures that end the session.
        """
        while True:
            try:
                if mesh.state != "serving":
                    async with self.router.resident():
                        await self._start(mesh)
                    await self.push.join(mesh)
                    self.router.join(mesh)
                    self._changed.notify()
                    self.events.emit("joined", process=mesh.name, text=f"{mesh.name} has joined")
                raise await mesh.failed()
            except ActorFailure as failure:
                mesh.state = "absent"
                self.recovery.survive(
                    failure,
                    "starting it again",
                    progressed=mesh.has_answered,
                    generator=mesh.name,
                )
                mesh.has_answered = False

    async def _start(self, mesh: GeneratorMesh) -> None:
        """Start the generator unless it is running. Remaining processes of a lost one end first."""
        mesh.watch = self.push.watch
        with self.push.watch.span("start", mesh.name):
            if not mesh.is_running:
                await mesh.stop()
                await mesh.start()
