"""Reward workers, as the controller sees them."""

import asyncio
import math
from collections import deque
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rl.actors.endpoint import Endpoint, P
from rl.actors.fork_server import GUARDED
from rl.actors.group import ActorGroup
from rl.actors.hosts import Hosts
from rl.actors.reward_worker import MESSAGE_S, RewardWorker, local_rewards
from rl.environments.protocol import EnvironmentTask
from rl.environments.task import Task
from rl.errors import ActorFailure, GroupLost, RankLost, RunError, WorkerLost, error_text
from rl.host.threads import DaemonThread
from rl.model.shape import ModelConfig
from rl.observe.events import Events
from rl.rollout.scoring import Scored, rollouts_of
from rl.types import Completion, EpisodeTurn, Place, Prompt, Rollout
from rl.types.deadlines import DeadlineConfig

GRACE_S = 10.0  # for a busy worker to find that a call took too long


@dataclass(eq=False, slots=True)
class _Job:
    """Group of completions to score."""

    prompt: Prompt
    completions: Sequence[Completion]
    scored: asyncio.Future[Scored]
    alone: bool = False
    """Whether this is the second try, because the worker that had the job first was lost."""

    def set_answer(self, answer: Scored | Exception) -> None:
        """Set the result unless it is already set."""
        if self.scored.done():
            return
        if isinstance(answer, Exception):
            self.scored.set_exception(answer)
        else:
            self.scored.set_result(answer)


@dataclass(kw_only=True, eq=False)
class RewardWorkers:
    """Workers with a copy of the task each; with ``count`` 0, the task is in this process. ::

        workers = RewardWorkers(config=config.task, model=config.model, count=2, ...)
        await workers.start()
        rollouts = await workers.score(prompt, completions)
        turn = await workers.open(1, prompt, sample=0)      # of a task with environments
        while turn.end is None:
            turn = await workers.step(1, answer)
        await workers.stop()

    A worker that dies or hangs is started again.

    - Groups to score wait in a queue, and an idle worker takes its share of them. A worker whose
      ``score`` is a coroutine function always takes more. If a worker is lost, each of its groups
      is tried once more, alone, so that only the group that is to blame is lost.
    - An episode stays with one worker, the one with the fewest open episodes at its begin. If the
      worker is lost, the next call of each of its episodes raises WorkerLost. Such an episode can
      be opened once more under the same key.
    """

    config: Task.Config
    model: ModelConfig
    hosts: Hosts
    count: int
    seed: int
    deadlines: DeadlineConfig
    events: Events
    restarts: int = field(default=0, init=False)
    """Number of times that a worker was started again."""

    def __post_init__(self) -> None:
        self._groups: dict[str, ActorGroup] = {}
        self._load: dict[ActorGroup, int] = {}
        """Number of open episodes, or of calls to score, of each worker that takes more work."""
        self._homes: dict[int, ActorGroup] = {}
        """Worker of each open episode."""
        self._waiting: deque[_Job] = deque()
        self._again: deque[_Job] = deque()
        self._held: set[_Job] = set()
        """Jobs that workers have."""
        self._scores_at_once = False
        self._started = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = DaemonThread("reward")  # of a reward in this process
        self._broken: RunError | None = RunError("the reward workers were not started")

    async def start(self) -> None:
        """Start the workers and build their tasks. Workers that still run are stopped first."""
        await self.stop()
        if self.count == 0:
            task: Task = self.config.build_scorer(seed=self.seed, model=self.model)
            self._here = local_rewards(task, self.deadlines.reward, self._thread)
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
        self._load.clear()
        self._thread.shutdown()
        await asyncio.gather(*(group.stop() for group in self._groups.values()))

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Rollout]:
        """Return the group's rollouts.

        Raises:

        - GroupLost if the reward raised, hung, died or returned no score.
        - RunError if a lost worker could not be started again.
        """
        if self.count == 0:
            return await self._here.score(prompt, completions)
        self._require()
        sent = [completion.without_mask() for completion in completions]
        job = _Job(prompt, sent, asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        self._dispatch()
        return rollouts_of(prompt, completions, await job.scored)

    async def open(self, key: int, prompt: Prompt, sample: int) -> EpisodeTurn:
        """Begin an episode; return the tokens before its first answer. Raises GroupLost."""
        if self.count == 0:
            return await self._here.open(key, prompt, sample)
        self._require()
        while (group := self._least_loaded()) is None:
            self._started.clear()
            await self._started.wait()
            self._require()
        self._homes[key] = group
        self._load[group] += 1
        return await self._ask(key, RewardWorker.open, key, prompt, sample)

    async def step(self, key: int, answer: Completion) -> EpisodeTurn:
        """Give the environment an answer of the policy; return the tokens before the next one, or
        the end of the episode. Raises GroupLost.
        """
        if self.count == 0:
            return await self._here.step(key, answer)
        self._require()
        return await self._ask(key, RewardWorker.step, key, answer.without_mask())

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
        for group, members in homes.items():
            self._create_task(self._close(group, members))

    def _require(self) -> None:
        if self._broken is not None:
            raise self._broken.with_traceback(None)

    def _least_loaded(self) -> ActorGroup | None:
        running = [group for group in self._load if not group.is_over]
        return min(running, key=self._load.__getitem__, default=None)

    def _dispatch(self) -> None:
        """Send waiting jobs to workers, second tries first and alone."""
        while self._again or self._waiting:
            group = self._least_loaded()
            alone = bool(self._again)
            takes_more = self._scores_at_once and not alone
            if group is None or (self._load[group] and not takes_more):
                return
            queue = self._again if alone else self._waiting
            count = 1 if alone else math.ceil(len(queue) / self.count)
            taken = [queue.popleft() for _ in range(count)]
            jobs = [job for job in taken if not job.scored.done()]  # cancelled, or given up
            if not jobs:
                continue
            if alone:
                del self._load[group]  # it takes no more work
            else:
                self._load[group] += 1
            self._held |= {*jobs}
            self._create_task(self._score(group, jobs))

    async def _score(self, group: ActorGroup, jobs: list[_Job]) -> None:
        work = [(job.prompt, job.completions) for job in jobs]
        limit = self.deadlines.reward
        answers: Sequence[Scored | Exception]
        try:
            worker = group.on(timeout_s=self._call_s)
            (answers,) = await worker.call(RewardWorker.score, work, limit)
        except RankLost as failure:
            answers = [self._lost(job, failure) for job in jobs if job.alone]
            for job in jobs:
                job.alone = True
        except Exception as error:  # any error must reach the callers of ``score``
            answers = [error] * len(jobs)
        self._held -= {*jobs}
        for job, answer in zip(jobs, answers, strict=False):
            job.set_answer(answer)
        left = [job for job in reversed(jobs) if not job.scored.done()]
        self._again.extendleft(job for job in left if job.alone)
        self._waiting.extendleft(job for job in left if not job.alone)
        if not group.is_over:
            self._load[group] = self._load.get(group, 1) - 1
        self._dispatch()

    def _lost(self, job: _Job, failure: RankLost) -> GroupLost:
        how, task = self._named(failure)
        message = f"the reward of {task} {how}; prompt {job.prompt.prompt_id}; {failure}"
        return GroupLost(f"reward {how}", message)

    async def _ask(
        self,
        key: int,
        endpoint: Endpoint[P, EpisodeTurn | GroupLost],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> EpisodeTurn:
        """Call the worker that has episode ``key``. Raises GroupLost."""
        group = self._homes[key]
        in_call = not group.is_over
        try:
            (turn,) = await group.on(timeout_s=self._call_s).call(endpoint, *args, **kwargs)
        except RankLost as failure:
            how, task = self._named(failure)
            message = f"the worker of an environment of {task} {how}; episode {key}; {failure}"
            turn = WorkerLost(f"environment worker {how}", message, in_call=in_call)
        if isinstance(turn, GroupLost) or turn.end is not None:
            self._forget(key)
        if isinstance(turn, GroupLost):
            raise turn
        return turn

    async def _close(self, group: ActorGroup, keys: list[int]) -> None:
        with suppress(ActorFailure):  # a lost worker has no open episodes
            await group.on(timeout_s=self._call_s).call(RewardWorker.close, keys)

    def _forget(self, key: int) -> ActorGroup | None:
        """Return the worker that has episode ``key``, which ends; None if it has ended."""
        group = self._homes.pop(key, None)
        if group in self._load:
            self._load[group] -= 1
        return group

    @property
    def _call_s(self) -> float:
        """Time for a call of a worker."""
        if isinstance(self.config, EnvironmentTask.Config):
            return 2 * self.config.step_s + GRACE_S  # to make an environment and to reset it
        return self.deadlines.reward + (GRACE_S if self._scores_at_once else MESSAGE_S)

    def _named(self, failure: RankLost) -> tuple[str, str]:
        """Return how a worker was lost, and the name of its task."""
        how = "died" if failure.kind == "died" else "hung"
        return how, type(self.config).__qualname__.removesuffix(".Config")

    async def _spawn(self, name: str) -> None:
        heartbeat = self.deadlines.heartbeat
        group = ActorGroup(name, Place(ranks=1), self.hosts, heartbeat=heartbeat)
        self._groups[name] = group
        arguments = (self.config, self.seed, self.model)
        env = {GUARDED: "1"}  # the user's code may start processes
        deadline = self.deadlines.start
        await group.spawn(RewardWorker, *arguments, deadline=deadline, env=env, meet=False)
        (self._scores_at_once,) = await group.on(timeout_s=deadline).call(RewardWorker.start)

    async def _keep(self, name: str) -> None:
        """Use the worker, and start it again whenever it is lost."""
        try:
            while True:
                group = self._groups[name]
                self._load[group] = 0
                self._started.set()
                self._dispatch()
                failure = await group.failed()
                self._load.pop(group, None)
                text = f"{str(failure).splitlines()[0]}; starting it again"
                self.events.emit("lost", process=name, text=text)
                self.restarts += 1
                await group.stop()
                await self._spawn(name)
        except RunError as failure:  # of the start, or of a record that cannot be written
            self._give_up(failure)
        except Exception as error:
            self._give_up(RunError(f"{name} cannot be started again: {error_text(error)}"))

    def _give_up(self, error: RunError) -> None:
        """Fail all calls from now on."""
        self._broken = error
        self._started.set()
        for job in [*self._held, *self._again, *self._waiting]:
            job.set_answer(error)

    def _create_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
