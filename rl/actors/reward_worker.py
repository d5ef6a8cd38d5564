"""Process that runs the user's task: it scores completions, or holds environments of episodes."""

import asyncio
import os
import time
from collections.abc import Awaitable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from monarch.actor import Actor

from rl.actors.endpoint import T, endpoint
from rl.environments.protocol import EnvironmentTask
from rl.environments.task import Task
from rl.errors import GroupLost
from rl.model.shape import ModelConfig
from rl.rollout.episodes import Environments
from rl.rollout.scoring import LocalReward, Scored, is_async, score_awaited
from rl.types import Completion, EpisodeTurn, Prompt

MESSAGE_S = 0.1  # time for the groups of a message, but at least one: quick groups share messages
MAX_HUNG = 8  # threads of calls that hang; more of them would slow down the other episodes
LEAVE_S = 0.5  # for the answers of the last calls to be sent


@dataclass(eq=False)
class RewardWorker(Actor):
    """Process with a task of its own, which scores completions or has open episodes."""

    config: Task.Config
    seed: int
    model: ModelConfig

    @endpoint
    async def start(self) -> bool:
        """Build the task; return whether it scores many groups at once."""
        self._task: Task = self.config.build_scorer(seed=self.seed, model=self.model)
        if isinstance(self._task, EnvironmentTask):
            self._environments = Environments(self._task)
        self._calls = 0
        return is_async(self._task)

    @endpoint
    async def score(
        self, groups: list[tuple[Prompt, Sequence[Completion]]], limit: float
    ) -> list[Scored | GroupLost]:
        """Score the first groups: as many as there is time for, but at least one. A coroutine
        function scores them all at once, each in at most ``limit`` seconds.
        """
        work = (_outcome(score_awaited(self._task, *group, limit=limit)) for group in groups)
        if is_async(self._task):
            return await asyncio.gather(*work)
        ends = time.monotonic() + MESSAGE_S
        answers = list[Scored | GroupLost]()
        for outcome in work:
            answers.append(await outcome)
            if time.monotonic() > ends:
                break
        return answers

    @endpoint
    async def open(self, key: int, prompt: Prompt, sample: int) -> EpisodeTurn | GroupLost:
        return await self._answered(self._environments.open(key, prompt, sample))

    @endpoint
    async def step(self, key: int, answer: Completion) -> EpisodeTurn | GroupLost:
        return await self._answered(self._environments.step(key, answer))

    @endpoint
    async def close(self, keys: list[int]) -> None:
        await self._environments.close(keys)

    async def _answered(self, call: Awaitable[EpisodeTurn]) -> EpisodeTurn | GroupLost:
        """Return the result of ``call``. If too many calls hang in this process, it ends after the
        calls under way, which may hang too: each is lost for its own reason.
        """
        self._calls += 1
        try:
            return await _outcome(call)
        finally:
            self._calls -= 1
            if self._environments.hung > MAX_HUNG:
                asyncio.get_running_loop().call_later(LEAVE_S, self._leave)

    def _leave(self) -> None:
        if not self._calls or self._environments.hung > MAX_HUNG**2:
            os._exit(1)


async def _outcome(call: Awaitable[T]) -> T | GroupLost:
    """Return the result of ``call``, or the GroupLost that it raises."""
    try:
        return await call
    except GroupLost as lost:
        return lost


def local_rewards(task: Task, limit: float, thread: Executor) -> Any:
    """Return what scores completions of ``task`` in this process, or holds its environments: see
    :class:`rl.rollout.scoring.LocalReward`.
    """
    if isinstance(task, EnvironmentTask):
        return Environments(task)
    return LocalReward(task, limit, thread)
