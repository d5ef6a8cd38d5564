"""Processes that run the user's task, started again when they die or hang."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, ClassVar

from monarch.actor import Actor

from rl.actors.fork_server import GUARDED
from rl.actors.group import ActorGroup
from rl.actors.mesh import Deadlines
from rl.actors.supervisor import Supervisor
from rl.errors import RunError
from rl.model.shape import ModelConfig
from rl.observe.events import Events
from rl.tasks.base import Task
from rl.types import Place

GRACE_S = 10.0  # for a busy worker to find that a call took too long


@dataclass(kw_only=True, eq=False)
class TaskWorkers:
    """Workers with a copy of the task each. With ``count`` 0 the task is in this process."""

    actor: ClassVar[type[Actor]]
    """Actor of a worker, made of the task's config, the seed and the model."""

    config: Task.Config
    model: ModelConfig
    supervisor: Supervisor
    count: int
    seed: int
    deadlines: Deadlines
    events: Events
    restarts: int = field(default=0, init=False)
    """Number of times that a worker was started again."""

    def __post_init__(self) -> None:
        self._groups: dict[str, ActorGroup] = {}
        self._scores_at_once = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._broken: RunError | None = RunError("the reward workers were not started")

    async def start(self) -> None:
        """Start the workers and build their tasks; can be called again after ``stop``."""
        if self.count == 0:
            self._task: Task = self.config.build_scorer(seed=self.seed, model=self.model)
        names = [f"reward-{number}" for number in range(self.count)]
        await asyncio.gather(*map(self._spawn, names))
        self._broken = None
        for name in names:
            self._create_task(self._keep(name))

    @property
    def is_running(self) -> bool:
        """Whether the workers were started, and neither stopped nor given up since."""
        return self._broken is None

    async def stop(self) -> None:
        """End the workers, whatever they are doing, and fail pending calls. Raises nothing."""
        self._give_up(RunError("the reward workers were stopped"))
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(group.stop() for group in self._groups.values()))

    def _started(self, group: ActorGroup) -> None:
        """Take note of a worker that was started, for the first time or again."""

    def _give_up(self, error: RunError) -> None:
        """Fail all calls from now on."""
        self._broken = error

    async def _spawn(self, name: str) -> None:
        heartbeat = self.deadlines.heartbeat
        group = ActorGroup(name, Place(ranks=1), self.supervisor, heartbeat=heartbeat)
        self._groups[name] = group
        arguments = (self.config, self.seed, self.model)
        env = {GUARDED: "1"}  # the user's code may start processes
        deadline = self.deadlines.start
        await group.spawn(self.actor, *arguments, deadline=deadline, env=env, meet=False)
        (self._scores_at_once,) = await group.call("start", deadline=deadline)

    async def _keep(self, name: str) -> None:
        """Use the worker, and start it again whenever it is lost."""
        try:
            while True:
                group = self._groups[name]
                self._started(group)
                failure = await group.failed()
                text = f"{str(failure).splitlines()[0]}; starting it again"
                self.events.emit("lost", process=name, text=text)
                self.restarts += 1
                await group.stop()
                await self._spawn(name)
        except RunError as failure:  # of the start, or of a record that cannot be written
            self._give_up(failure)

    def _create_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
