"""Processes that hold the environments of episodes."""

import asyncio
import os
from collections.abc import Awaitable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from monarch.actor import Actor, concurrent_endpoint

from rl.actors.group import ActorGroup
from rl.actors.task_workers import GRACE_S, TaskWorkers
from rl.errors import ActorFailure, GroupLost, RankLost, RunError, WorkerLost
from rl.model.shape import ModelConfig
from rl.rollout.environments import Environments
from rl.tasks.environment import EnvironmentTask
from rl.types import Completion, EpisodeTurn, Prompt

MAX_HUNG = 8  # threads of calls that hang; more of them would slow down the other episodes
LEAVE_S = 0.5  # for the answers of the last calls to be sent


@dataclass(eq=False)
class EnvironmentWorker(Actor):
    """Holds open episodes of a task of its own."""

    config: EnvironmentTask.Config
    seed: int
    model: ModelConfig

    @concurrent_endpoint
    async def start(self) -> bool:
        task = self.config.build_scorer(seed=self.seed, model=self.model)
        self._environments = Environments(cast(EnvironmentTask, task))
        self._calls = 0
        return False

    @concurrent_endpoint
    async def open(self, key: int, prompt: Prompt, sample: int) -> EpisodeTurn | GroupLost:
        return await self._answered(self._environments.open(key, prompt, sample))

    @concurrent_endpoint
    async def step(self, key: int, answer: Completion) -> EpisodeTurn | GroupLost:
        return await self._answered(self._environments.step(key, answer))

    @concurrent_endpoint
    async def close(self, keys: list[int]) -> None:
        await self._environments.close(keys)

    async def _answered(self, call: Awaitable[EpisodeTurn]) -> EpisodeTurn | GroupLost:
        """Return the result of ``call``. If too many calls hang in this process, it ends after the
        calls under way, which may hang too: each is lost for its own reason.
        """
        self._calls += 1
        try:
            return await call
        except GroupLost as lost:
            return lost
        finally:
            self._calls -= 1
            if self._environments.hung > MAX_HUNG:
                asyncio.get_running_loop().call_later(LEAVE_S, self._leave)

    def _leave(self) -> None:
        if not self._calls or self._environments.hung > MAX_HUNG**2:
            os._exit(1)


@dataclass(kw_only=True, eq=False)
class EnvironmentWorkers(TaskWorkers):
    """Workers that hold the environments of episodes; with ``count`` 0, this process. ::

        workers = EnvironmentWorkers(config=config.task, model=config.model, count=2, ...)
        await workers.start()
        turn = await workers.open(1, prompt, sample=0)
        while turn.end is None:
            turn = await workers.step(1, answer)
        await workers.stop()

    An episode stays with one worker, the one with the fewest open episodes at its begin. If a
    worker dies or hangs, the next call of each of its episodes raises WorkerLost, and the worker is
    started again. Such an episode can be opened once more under the same key.
    """

    actor = EnvironmentWorker
    config: EnvironmentTask.Config

    def __post_init__(self) -> None:
        super().__post_init__()
        self._homes: dict[int, ActorGroup] = {}
        self._open: dict[ActorGroup, int] = {}
        """Number of open episodes of each running worker."""
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Start the workers and build their tasks; can be called again after ``stop``."""
        self._open.clear()
        self._changed.clear()
        await super().start()
        if self.count == 0:
            self._here = Environments(cast(EnvironmentTask, self._task))

    async def open(self, key: int, prompt: Prompt, sample: int) -> EpisodeTurn:
        """Begin an episode; return the tokens before its first answer. Raises GroupLost."""
        if self.count == 0:
            return await self._here.open(key, prompt, sample)
        while not self._open and self._broken is None:
            await self._changed.wait()
        self._require()
        group = min(self._open, key=self._open.__getitem__)
        self._homes[key] = group
        self._open[group] += 1
        return await self._ask(key, "open", key, prompt, sample)

    async def step(self, key: int, answer: Completion) -> EpisodeTurn:
        """Give the environment an answer of the policy; return the tokens before the next one, or
        the end of the episode. Raises GroupLost.
        """
        if self.count == 0:
            return await self._here.step(key, answer)
        return await self._ask(key, "step", key, answer.without_mask())

    async def close(self, keys: Iterable[int]) -> None:
        """Close the open episodes among ``keys``, without waiting for their workers. Raises
        nothing.
        """
        if self.count == 0:
            await self._here.close(keys)
            return
        homes: dict[ActorGroup, list[int]] = {}
        for key in keys:
            if (group := self._forget(key)) is not None:
                homes.setdefault(group, []).append(key)
        for group, own in homes.items():
            self._create_task(self._close(group, own))

    async def _close(self, group: ActorGroup, keys: list[int]) -> None:
        with suppress(ActorFailure):  # a lost worker has no open episodes
            await group.call("close", keys, deadline=self.config.step_s + GRACE_S)

    def _started(self, group: ActorGroup) -> None:
        self._open[group] = 0
        self._changed.set()

    def _give_up(self, error: RunError) -> None:
        super()._give_up(error)
        self._changed.set()

    def _require(self) -> None:
        if self._broken is not None:
            raise self._broken.with_traceback(None)

    async def _ask(self, key: int, endpoint: str, *args: Any) -> EpisodeTurn:
        """Call the worker that has episode ``key``. Raises GroupLost."""
        self._require()
        group = self._homes[key]
        in_call = not group.is_over
        deadline = 2 * self.config.step_s + GRACE_S  # to make an environment and to reset it
        try:
            (turn,) = await group.call(endpoint, *args, deadline=deadline)
        except RankLost as failure:
            self._lost(group)
            how = "died" if failure.kind == "died" else "hung"
            task = type(self.config).__qualname__.removesuffix(".Config")
            message = f"the worker of an environment of {task} {how}; episode {key}; {failure}"
            turn = WorkerLost(f"environment worker {how}", message, in_call=in_call)
        if isinstance(turn, GroupLost) or turn.end is not None:
            self._forget(key)
        if isinstance(turn, GroupLost):
            raise turn
        return turn

    def _lost(self, group: ActorGroup) -> None:
        """Give no more episodes to ``group``, which is started again."""
        self._open.pop(group, None)
        if not self._open:
            self._changed.clear()

    def _forget(self, key: int) -> ActorGroup | None:
        """Return the worker that has episode ``key``, which ends; None if it has ended."""
        group = self._homes.pop(key, None)
        if group in self._open:
            self._open[group] -= 1
        return group
