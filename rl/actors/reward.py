"""Processes that score completions. If the user's code hangs or crashes, it costs one group."""

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import cast

from monarch.actor import Actor, concurrent_endpoint

from rl.actors.group import ActorGroup
from rl.actors.task_workers import GRACE_S, TaskWorkers
from rl.errors import GroupLost, RankLost, RunError
from rl.model.shape import ModelConfig
from rl.rollout.scoring import is_async, rollouts_of, score_at_once, score_group, score_here
from rl.tasks.base import Score, Task
from rl.types import Completion, Prompt, Rollout

TURN_S = 0.1  # a message has groups for this long, or one group: quick groups share messages

Scored = list[tuple[str, Score]]


@dataclass(eq=False)
class RewardWorker(Actor):
    """Process that builds the task of the run and scores completions with it."""

    config: Task.Config
    seed: int
    model: ModelConfig

    @concurrent_endpoint
    async def start(self) -> bool:
        """Build the task; return whether it scores many groups at once."""
        self._task: Task = self.config.build_scorer(seed=self.seed, model=self.model)
        return is_async(self._task)

    @concurrent_endpoint
    async def score(
        self, groups: list[tuple[Prompt, Sequence[Completion]]], limit: float
    ) -> list[Scored | GroupLost]:
        """Score the first groups: as many as there is time for, but at least one. A coroutine
        function scores them all at once, each in at most ``limit`` seconds.
        """
        if is_async(self._task):
            work = (score_at_once(self._task, *group, limit=limit) for group in groups)
            found = await asyncio.gather(*work, return_exceptions=True)
            for each in found:
                if isinstance(each, BaseException) and not isinstance(each, GroupLost):
                    raise each
            return cast(list[Scored | GroupLost], found)
        ends = time.monotonic() + TURN_S
        answers = list[Scored | GroupLost]()
        for prompt, completions in groups:
            try:
                answers.append(score_group(self._task, prompt, completions))
            except GroupLost as lost:
                answers.append(lost)
            if time.monotonic() > ends:
                break
        return answers


@dataclass(eq=False, slots=True)
class _Job:
    prompt: Prompt
    completions: Sequence[Completion]
    scored: asyncio.Future[Scored]
    alone: bool = False
    """Whether this is the second try, because the worker that had the job first was lost."""

    def settle(self, answer: Scored | Exception | None) -> None:
        """Set the result unless it is already set; None leaves it open."""
        if self.scored.done() or answer is None:
            return
        if isinstance(answer, Exception):
            self.scored.set_exception(answer)
        else:
            self.scored.set_result(answer)


@dataclass(kw_only=True, eq=False)
class RewardWorkers(TaskWorkers):
    """Workers that score completions; with ``count`` 0, a thread of this process. ::

        workers = RewardWorkers(config=config.task, model=config.model, count=2, ...)
        await workers.start()
        rollouts = await workers.score(prompt, completions)
        await workers.stop()

    Groups wait in a queue, and an idle worker takes its share of them. A worker whose ``score`` is
    a coroutine function always takes more. If a worker is lost, each of its groups is tried once
    more, alone, so that only the group that is to blame is lost.
    """

    actor = RewardWorker

    def __post_init__(self) -> None:
        super().__post_init__()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward")
        self._idle: deque[ActorGroup] = deque()
        self._waiting: deque[_Job] = deque()
        self._again: deque[_Job] = deque()
        self._held: set[_Job] = set()
        self._calls: Counter[ActorGroup] = Counter()
        """Number of calls that each worker has not answered."""

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Rollout]:
        """Return the group's rollouts.

        Raises:

        - GroupLost if the reward raised, hung, died or returned no score.
        - ActorFailure if a lost worker could not be started again.
        """
        if self.count == 0:
            limit = self.deadlines.reward
            scored = await score_here(
                self._task, prompt, completions, limit=limit, thread=self._thread
            )
        elif self._broken is not None:
            raise self._broken.with_traceback(None)
        else:
            sent = [completion.without_mask() for completion in completions]
            job = _Job(prompt, sent, asyncio.get_running_loop().create_future())
            self._waiting.append(job)
            self._dispatch()
            scored = await job.scored
        return rollouts_of(prompt, completions, scored)

    def _started(self, group: ActorGroup) -> None:
        self._idle.append(group)
        self._dispatch()

    def _dispatch(self) -> None:
        """Send waiting jobs to idle workers, second tries first and alone."""
        while self._idle and (self._again or self._waiting):
            group = self._idle.popleft()
            if group.is_over:
                continue
            if self._again and self._calls[group]:
                continue  # its last answer makes it idle again
            jobs = [self._again.popleft()] if self._again else self._share()
            self._calls[group] += 1
            self._create_task(self._score(group, jobs))
            if self._scores_at_once and not jobs[0].alone:
                self._idle.append(group)

    def _share(self) -> list[_Job]:
        """Take one worker's share of the waiting jobs."""
        count = math.ceil(len(self._waiting) / self.count)
        return [self._waiting.popleft() for _ in range(count)]

    async def _score(self, group: ActorGroup, jobs: list[_Job]) -> None:
        given = [(job.prompt, job.completions) for job in jobs]
        self._held |= {*jobs}
        limit = self.deadlines.reward
        deadline = limit + (GRACE_S if self._scores_at_once else TURN_S)
        try:
            (answers,) = await group.call("score", given, limit, deadline=deadline)
        except Exception as error:  # any error must reach the callers of ``score``
            answers = [self._without_answer(job, error) for job in jobs]
        self._held -= {*jobs}
        for job, answer in zip(jobs, answers, strict=False):
            job.settle(answer)
        left = [job for job in reversed(jobs) if not job.scored.done()]
        self._again.extendleft(job for job in left if job.alone)
        self._waiting.extendleft(job for job in left if not job.alone)
        self._calls[group] -= 1
        if group not in self._idle:
            self._idle.append(group)
        self._dispatch()

    def _without_answer(self, job: _Job, error: Exception) -> Exception | None:
        """Return the result for a job whose worker did not answer; None means retry."""
        if not isinstance(error, RankLost):
            return error
        if not job.alone:
            job.alone = True
            return None
        how = "died" if error.kind == "died" else "hung"
        task = type(self.config).__qualname__.removesuffix(".Config")
        message = f"the reward of {task} {how}; prompt {job.prompt.prompt_id}; {error}"
        return GroupLost(f"reward {how}", message)

    def _give_up(self, error: RunError) -> None:
        super()._give_up(error)
        for job in [*self._held, *self._again, *self._waiting]:
            job.settle(error)
