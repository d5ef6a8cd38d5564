"""Scheduler that fills the ledger with rollouts, as far ahead as staleness allows."""

import math
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rl.config import RLConfig
from rl.environments.task import Task
from rl.errors import GroupLost, RunError
from rl.rollout.prompts import training_prompt
from rl.rollout.rollout_metrics import RewardKey, all_equal
from rl.rollout.rollouter import Generate
from rl.session.concurrency import Signal, background
from rl.session.session import Session
from rl.trainers.curriculum import Curriculum
from rl.trainers.ledger import Group, Ledger
from rl.types import Prompt

WINDOW = 100  # groups over which lost ones are counted, or a step's if these are more


@dataclass(eq=False)
class RolloutScheduler:
    """Samples and scores prompts, and brings generators the weights that they sample with.

    - Deterministic pipeline: the batch of step k is sampled whole, in as many shares as the config
      has replicas, from the weights after step k - max_staleness. Which requests a generator
      answers together depends on the config alone.
    - Asynchronous pipeline: every prompt is a task of its own, and generators pull the newest
      weights as soon as these are published.

    A group that is lost, or has equal rewards only, makes room for the next prompt.

    ``evaluate(step)`` is called when every generator holds the weights after ``step``, or newer
    ones. At step 0 it is called before anything is sampled. In a deterministic pipeline it is
    called for each step, and nothing else is sampled meanwhile. In an asynchronous one it is called
    for the newest step when the call before has returned, and generators go on to newer weights.
    It returns False if the run is left before an evaluation ends. ``reward_key`` is
    :meth:`rl.trainers.algorithm.Algorithm.reward_key`.
    """

    config: RLConfig
    task: Task
    session: Session
    changed: Signal
    evaluate: Callable[[int], Awaitable[bool]]
    reward_key: RewardKey
    last_step: Callable[[], int]
    """Function that returns the number of steps, which an evaluation may lower."""

    def __post_init__(self) -> None:
        self._sampling = self.config.rollout.sampling(self.task.stop_token_ids)
        self._size = self.config.rollout.prompts_per_step
        # Share that each of the newest groups lost: its episodes, or all of it.
        self._recent: deque[float] = deque(maxlen=max(WINDOW, self._size))
        self._before_batch: list[float] = []  # the same, without the batch that is being sampled
        self._sampled = 0  # batches
        self._curriculum = Curriculum(self.config.rollout.curriculum, self.config.seed)
        self._figures = dict[int, dict[str, float]]()  # of the curriculum, after each batch
        self._evaluated = -1  # in order: no evaluation of this step or older ones is left
        self.is_done = False
        """Whether all steps have their batches, all weights have arrived and evaluations on the way
        have ended."""
        self.is_left = False
        """Whether the run was left before an evaluation of a deterministic pipeline ended."""

    async def run(self, ledger: Ledger, step: int) -> None:
        """Sample rollouts for the steps after ``step``. ``ledger`` holds those sampled before."""
        self._resampled = 0
        self.is_done = self.is_left = False
        self._evaluated = step - 1
        self._held = self.session.version
        self._versions = {step: self._held}
        self._arrived = step  # every generator holds the weights of this step or newer ones
        if step == 0:
            await self.evaluate(0)
        if self.config.rollout.pipeline == "deterministic":
            await self._run_in_order(ledger, step)
        else:
            await self._run_free(ledger, step)

    def may_save(self, step: int) -> bool:
        """Whether neither a batch nor an evaluation needs weights older than those after
        ``step``.
        """
        rollout = self.config.rollout
        if rollout.pipeline == "asynchronous":
            return True
        needed = min(step + rollout.max_staleness, self.last_step())
        return self._sampled >= needed and self._evaluated >= step - 1

    def stepped(self, step: int) -> None:
        """Note that ``step`` was trained and its weights are on their way to the generators.

        In an asynchronous pipeline, in which no batch has a limit of its own, groups may be
        resampled again.
        """
        self._versions[step] = self.session.version
        self.changed.notify()
        if self.config.rollout.pipeline == "asynchronous":
            self._resampled = 0

    def take_figures(self, step: int) -> dict[str, float]:
        """Return the metrics of the curriculum when the batch of ``step`` had been sampled, or in
        an asynchronous pipeline now.
        """
        return self._figures.pop(step, None) or self._curriculum.metrics()

    def to_dict(self) -> dict[str, Any]:
        """Return the state, as JSON.

        In a deterministic pipeline it lacks the batch that is sampled again after a restore.
        """
        deterministic = self.config.rollout.pipeline == "deterministic"
        lost = self._before_batch if deterministic else [*self._recent]
        figures = [*self._figures.items()]
        return {"lost": lost, "curriculum": self._curriculum.to_dict(), "figures": figures}

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to the state that ``to_dict`` returned; {} is the start."""
        self._before_batch = state.get("lost", [])
        self._recent = deque(self._before_batch, maxlen=self._recent.maxlen)
        self._curriculum.restore(state.get("curriculum", []))
        self._figures = dict(state.get("figures", []))

    async def _run_in_order(self, ledger: Ledger, step: int) -> None:
        """Sample all batches, and evaluate, in the order of the weights."""
        staleness = self.config.rollout.max_staleness
        self._sampled = step + len(ledger) // self._size
        for loaded in range(step, self.config.steps + 1):
            if loaded > self.last_step():
                break
            await self._pull(loaded)
            while self._sampled < min(loaded + staleness + 1, self.last_step()):
                await self._sample_batch(ledger)
                self._sampled += 1
                self.changed.notify()
            self.is_left = not await self.evaluate(loaded)
            if self.is_left:
                break
            self._evaluated = loaded
            self.changed.notify()
        self.is_done = not self.is_left
        self.changed.notify()

    async def _pull(self, step: int) -> None:
        """Wait until every generator holds the weights after ``step`` or newer ones."""
        await self.changed.until(lambda: step in self._versions)
        self._held = await self.session.pull(self._versions[step])
        while self._versions.get(self._arrived + 1, math.inf) <= self._held:
            self._arrived += 1
        self.changed.notify()

    async def _sample_batch(self, ledger: Ledger) -> None:
        """Sample one batch. Each round samples the groups that are still missing."""
        alone = partial(self.session.sample, alone=True)
        verdicts = dict[int, Group | str]()
        groups = dict[int, Group | GroupLost]()
        self._resampled = 0
        while missing := self._size - sum(isinstance(judged, list) for judged in verdicts.values()):
            drawn = math.ceil(missing * self.config.rollout.oversampling)
            prompt_ids = [ledger.admit(self._held) for _ in range(drawn)]
            count = min(self.config.generator.replicas, drawn)
            shares = [prompt_ids[share::count] for share in range(count)]
            # A share that fails ends the others, since a new attempt asks them again.
            async with background() as work:
                answers = [work.create_task(self._sample(share, alone)) for share in shares]
            outcomes = {
                prompt_id: group
                for answer in answers
                for prompt_id, group in answer.result().items()
            }
            groups |= outcomes
            for prompt_id in prompt_ids:
                verdict = self._judge(outcomes[prompt_id]) if missing else "batch complete"
                missing -= isinstance(verdict, list)
                verdicts[prompt_id] = verdict
        # All at once: a checkpoint has the whole batch, or samples it again.
        for prompt_id, verdict in verdicts.items():
            _record_verdict(ledger, prompt_id, verdict)
        self._before_batch = [*self._recent]
        places = [(self._curriculum.draw(prompt_id), prompt_id) for prompt_id in sorted(groups)]
        for place, prompt_id in places:
            self._note(place, groups[prompt_id])
        if figures := self._curriculum.metrics():
            self._figures[self._sampled + 1] = figures

    async def _run_free(self, ledger: Ledger, step: int) -> None:
        """Sample prompts one by one, as many as the bound and the rest of the run allow."""
        last = ledger.trained + (self.config.steps - step) * self._size

        async def sample(prompt_id: int) -> None:
            place = self._curriculum.draw(prompt_id)
            answer = await self._sample(
                [prompt_id], partial(self.session.sample, affinity=prompt_id)
            )
            self._note(place, answer[prompt_id])
            _record_verdict(ledger, prompt_id, self._judge(answer[prompt_id]))
            self.changed.notify()

        async def pull_newest() -> None:
            for trained in range(step + 1, self.config.steps + 1):
                await self._pull(trained)

        async def evaluate_newest() -> None:
            evaluated = step - 1
            while evaluated < self.config.steps:
                await self.changed.until(lambda: self._arrived > evaluated)  # noqa: B023
                evaluated = self._arrived
                await self.evaluate(evaluated)
            self.is_done = True
            self.changed.notify()

        async with background(pull_newest(), evaluate_newest()) as work:
            while True:
                await self.changed.until(
                    lambda: ledger.admits(self._held) and ledger.trained + len(ledger) < last
                )
                work.create_task(sample(ledger.admit(self._held)))

    async def _sample(
        self, prompt_ids: list[int], generate: Generate
    ) -> dict[int, Group | GroupLost]:
        rollout = self.config.rollout
        temperature = self.config.temperature(self._sampled)
        groups = await self.session.rollouter.collect(
            [self._prompt(prompt_id) for prompt_id in prompt_ids],
            replace(self._sampling, temperature=temperature),
            samples=rollout.samples_per_prompt,
            generate=generate,
            fewest=rollout.min_episodes,
        )
        return dict(zip(prompt_ids, groups, strict=True))

    def _prompt(self, prompt_id: int) -> Prompt:
        """Return the prompt that the curriculum chooses for ``prompt_id``."""
        prompt = training_prompt(self.task, self._curriculum.draw(prompt_id))
        return replace(prompt, prompt_id=prompt_id)

    def _note(self, place: int, outcome: Group | GroupLost) -> None:
        """Tell the curriculum of the group of the task's prompt ``place``."""
        if not isinstance(outcome, GroupLost):
            self._curriculum.note(place, outcome)

    def _judge(self, outcome: Group | GroupLost) -> Group | str:
        """Return the group, or the reason for which it is dropped.

        Raises RunError, with the last cause, if too many groups were lost.
        """
        rollout = self.config.rollout
        if not isinstance(outcome, GroupLost):
            scored = [episode for episode in outcome if not episode.abstained]
            if len(scored) < min(2, len(outcome)):
                message = f"{len(outcome) - len(scored)} of {len(outcome)} rewards are None"
                outcome = GroupLost("rewards abstained", message)
        left = 0 if isinstance(outcome, GroupLost) else len(outcome)
        self._recent.append(1 - left / rollout.samples_per_prompt)
        lost = sum(self._recent)
        too_many = lost > rollout.max_lost * (self._recent.maxlen or 0)
        if too_many and left < rollout.samples_per_prompt:
            cause = outcome if isinstance(outcome, GroupLost) else None
            raise RunError(
                f"{lost:g} of the last {len(self._recent)} groups were lost, more than "
                f"rollout.max_lost={rollout.max_lost} allows; the last: "
                f"{cause or f'a group with {left} of its episodes'}"
            ) from cause
        if isinstance(outcome, GroupLost):
            return outcome.reason
        if self._resampled < rollout.max_resampled_groups and all_equal(scored, self.reward_key):
            self._resampled += 1
            return "rewards all equal"
        return outcome


def _record_verdict(ledger: Ledger, prompt_id: int, verdict: Group | str) -> None:
    """Store the group of a prompt, or drop the prompt for a reason."""
    if isinstance(verdict, str):
        ledger.drop(prompt_id, verdict)
    else:
        ledger.finish(prompt_id, verdict)
