"""Processes that score completions: the user's code may hang or crash in them, and costs
one group.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from monarch.actor import Actor, concurrent_endpoint

from rl.actors.group import ActorGroup, Deadlines
from rl.actors.hosts import GUARDED
from rl.actors.supervisor import Supervisor
from rl.errors import ActorFailure, GroupLost, RankLost, RunError
from rl.model.shape import ModelConfig
from rl.rollout.scoring import rollouts_of, score_group
from rl.tasks.base import Score, Task
from rl.types import Completion, Place, Prompt, Rollout

# a worker answers after this long, or after one group: quick ones need not cost a message each
TURN_S = 0.1

Scored = list[tuple[str, Score]]


class RewardWorker(Actor):
    """Scores with a task of its own."""

    def __init__(self, task: Task.Config, seed: int, model: ModelConfig):
        self._config = task
        self._seed = seed
        self._model = model

    @concurrent_endpoint
    async def start(self) -> None:
        self._task: Task = self._config.build_scorer(seed=self._seed, model=self._model)

    @concurrent_endpoint
    async def score(
        self, groups: list[tuple[Prompt, Sequence[Completion]]]
    ) -> list[Scored | GroupLost]:
        """Of the first groups, as many as there was time for, but of one at least."""
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
    """Whether it is tried for the second time, because the worker was lost that had it, perhaps
    with others."""

    def settle(self, answer: Scored | Exception | None) -> None:
        """Tell whoever waits, if there is an answer and anybody still waits."""
        if self.scored.done() or answer is None:
            return
        if isinstance(answer, Exception):
            self.scored.set_exception(answer)
        else:
            self.scored.set_result(answer)


class RewardWorkers:
    """``count`` workers, each started again when it dies or hangs; with 0, a thread of this
    process. ::

        workers = RewardWorkers(config.task, config.seed, config.model, supervisor, count=2, ...)
        await workers.start()
        rollouts = await workers.score(prompt, completions)
        await workers.stop()

    Groups wait in line. A worker without work gets its share of them. Where it is lost, each of
    these is tried once more, alone, so that the one that is to blame is the only one to be lost.
    """

    def __init__(
        self,
        task: Task.Config,
        model: ModelConfig,
        supervisor: Supervisor,
        *,
        count: int,
        seed: int,
        deadlines: Deadlines,
        say: Callable[[str], None],
    ):
        self._config = task
        self._seed = seed
        self._model = model
        self._supervisor = supervisor
        self._count = count
        self._deadlines = deadlines
        self._say = say
        self._groups: dict[str, ActorGroup] = {}
        self._idle: deque[ActorGroup] = deque()
        self._waiting: deque[_Job] = deque()
        self._again: deque[_Job] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._held: set[_Job] = set()
        self._broken: RunError | None = None
        self._started = False
        self.restarts = 0
        """How often a worker was started again, over the run."""

    async def start(self) -> None:
        """Start the workers and build their tasks; again after ``stop``."""
        self._broken = None
        if self._count == 0:
            self._task: Task = self._config.build_scorer(seed=self._seed, model=self._model)
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward")
        names = [f"reward-{number}" for number in range(self._count)]
        await asyncio.gather(*map(self._spawn, names))
        for name in names:
            self._run(self._keep(name))
        self._started = True

    @property
    def is_running(self) -> bool:
        """Whether it was started, and neither stopped since nor given up."""
        return self._started and self._broken is None

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Rollout]:
        """The group's rollouts.

        Raises GroupLost where they cannot be had, because the reward raised, hung, died or made no
        sense; ActorFailure where a worker that was lost could not be started again.
        """
        loop = asyncio.get_running_loop()
        if self._count == 0:
            scored = await loop.run_in_executor(
                self._thread, score_group, self._task, prompt, completions
            )
        elif self._broken is not None:
            raise self._broken.with_traceback(None)
        else:
            job = _Job(prompt, completions, loop.create_future())
            self._waiting.append(job)
            self._hand_out()
            scored = await job.scored
        return rollouts_of(prompt, completions, scored)

    async def stop(self) -> None:
        """End the workers, whatever they are doing, and whatever waits for them. Raises nothing."""
        self._give_up(RunError("the reward workers were stopped"))
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(group.stop() for group in self._groups.values()))

    async def _spawn(self, name: str) -> None:
        deadlines = self._deadlines
        group = self._groups[name] = ActorGroup(
            name, self._supervisor, heartbeat=deadlines.heartbeat
        )
        arguments = (self._config, self._seed, self._model)
        guarded = {GUARDED: "1"}  # the user's code may start anything
        deadline = deadlines.start
        await group.spawn(
            RewardWorker, Place(ranks=1), *arguments, deadline=deadline, env=guarded, meet=False
        )
        await group.call("start", deadline=deadlines.start)

    async def _keep(self, name: str) -> None:
        """Have the worker take part from now on, and start it again whenever it is lost."""
        try:
            while True:
                group = self._groups[name]
                self._idle.append(group)
                self._hand_out()
                self._say(f"{str(await group.failed()).splitlines()[0]}; starting it again")
                self.restarts += 1
                await group.stop()
                await self._spawn(name)
        except ActorFailure as failure:
            self._give_up(failure)

    def _hand_out(self) -> None:
        while self._idle and (self._again or self._waiting):
            group = self._idle.popleft()
            if group.is_over:
                continue
            line, share = (
                (self._again, 1)
                if self._again
                else (self._waiting, len(self._waiting) / self._count)
            )
            self._run(self._score(group, [line.popleft() for _ in range(math.ceil(share))]))

    async def _score(self, group: ActorGroup, jobs: list[_Job]) -> None:
        given = [(job.prompt, job.completions) for job in jobs]
        self._held |= {*jobs}
        try:
            (answers,) = await group.call("score", given, deadline=self._deadlines.reward + TURN_S)
        except Exception as error:  # whatever it is, somebody waits to be told
            answers = [self._fate(job, error) for job in jobs]
        self._held -= {*jobs}
        for job, answer in zip(jobs, answers, strict=False):
            job.settle(answer)
        left = [job for job in reversed(jobs) if not job.scored.done()]
        self._again.extendleft(job for job in left if job.alone)
        self._waiting.extendleft(job for job in left if not job.alone)
        self._idle.append(group)
        self._hand_out()

    def _fate(self, job: _Job, error: Exception) -> Exception | None:
        """What ``job`` comes to whose worker gave no answer; None for another try."""
        if not isinstance(error, RankLost):
            return error
        if not job.alone:
            job.alone = True
            return None
        how = "died" if error.kind == "died" else "hung"
        whose = f"the reward of {type(self._config).__qualname__.removesuffix('.Config')}"
        return GroupLost(f"reward {how}", f"{whose} {how}; prompt {job.prompt.prompt_id}; {error}")

    def _give_up(self, error: RunError) -> None:
        self._broken = error
        for job in [*self._held, *self._again, *self._waiting]:
            job.settle(error)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
