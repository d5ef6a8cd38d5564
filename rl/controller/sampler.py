"""Keeps the ledger filled with rollouts, as far ahead of the trainer as the staleness bound
allows.
"""

from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from rl.config import RLConfig, RolloutConfig
from rl.controller.concurrency import Signal, background
from rl.controller.ledger import Group, Ledger
from rl.controller.push import WeightPush
from rl.controller.router import Router
from rl.errors import GroupLost, RunError
from rl.rollout.prompts import training_prompt
from rl.rollout.rollouter import Generate, Rollouter
from rl.tasks.base import Task
from rl.types import Sampling

WINDOW = 100  # groups over which lost ones are counted, or a step's where these are more


class Sampler:
    """Has prompts answered and scored; what is lost, or teaches nothing, makes room for the next
    prompt.

    In a deterministic pipeline the batch of step k is sampled whole, in as many shares as there are
    replicas in the config, from the weights after step k - max_staleness: which requests a
    generator answers together depends on the config alone. In an asynchronous one every prompt is a
    task of its own.

    ``evaluate(step)`` is called while every generator holds the weights after ``step``: in a
    deterministic pipeline for each step, and with nothing else sampled meanwhile; in an
    asynchronous one for the newest step whenever the call before has returned, and generators go on
    to newer weights.
    """

    def __init__(
        self,
        config: RLConfig,
        task: Task,
        rollouter: Rollouter,
        router: Router,
        push: WeightPush,
        changed: Signal,
        evaluate: Callable[[int], Awaitable[None]],
    ):
        self._config = config
        self._task = task
        self._sampling = sampling_of(config.rollout, task)
        self._rollouter = rollouter
        self._router = router
        self._push = push
        self._changed = changed
        self._evaluate = evaluate
        self._size = config.rollout.prompts_per_step
        self._replicas = config.generator.replicas
        self._recent: deque[bool] = deque(
            maxlen=max(WINDOW, self._size)
        )  # whether each group was lost
        self._before_batch: list[bool] = []  # the same, without the batch that is being sampled
        self._replaced = 0
        self._sampled = 0  # batches
        self.is_done = False
        """Whether all steps have their batches, all weights have arrived and evaluations on the way
        have ended."""

    async def run(self, ledger: Ledger, step: int) -> None:
        """Sample what the steps after ``step`` are trained on; ``ledger`` holds what was sampled
        for them before.
        """
        self._replaced = 0
        self.is_done = False
        if self._config.rollout.pipeline == "deterministic":
            await self._run_in_order(ledger, step)
        else:
            await self._run_free(ledger, step)

    def may_cut(self, step: int) -> bool:
        """Whether all batches are sampled that need weights older than those after ``step``."""
        rollout = self._config.rollout
        needed = min(step + rollout.max_staleness, self._config.steps)
        return rollout.pipeline == "asynchronous" or self._sampled >= needed

    def stepped(self) -> None:
        """A step was trained: where no batch has a limit of its own, groups may be replaced
        again.
        """
        if self._config.rollout.pipeline == "asynchronous":
            self._replaced = 0

    def to_dict(self) -> dict[str, Any]:
        """JSON-able state.

        Of a deterministic pipeline, without the batch that is sampled again after a restore.
        """
        deterministic = self._config.rollout.pipeline == "deterministic"
        return {"lost": self._before_batch if deterministic else [*self._recent]}

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to what ``to_dict`` returned; from an empty dict, to the start."""
        self._before_batch = state.get("lost", [])
        self._recent = deque(self._before_batch, maxlen=self._recent.maxlen)

    async def _run_in_order(self, ledger: Ledger, step: int) -> None:
        """Weights after weights: the batches that are sampled from them, and their evaluation."""
        staleness = self._config.rollout.max_staleness
        steps = self._config.steps
        self._sampled = step + len(ledger) // self._size
        for held in range(step, steps + 1):
            await self._push.arrive(held)
            while self._sampled < min(held + staleness + 1, steps):
                await self._sample_batch(ledger)
                self._sampled += 1
                self._changed.notify()
            await self._evaluate(held)
        self._finish()

    def _finish(self) -> None:
        self.is_done = True
        self._changed.notify()

    async def _sample_batch(self, ledger: Ledger) -> None:
        """Fill one batch, in rounds: of the missing, until none is."""
        done: dict[int, Group] = {}
        dropped: dict[int, str] = {}
        self._replaced = 0
        while missing := self._size - len(done):
            prompt_ids = [ledger.admit(self._push.held) for _ in range(missing)]
            shares = [prompt_ids[share :: self._replicas] for share in range(self._replicas)]
            async with (
                background() as work
            ):  # one that fails ends the others, which a new attempt would ask again
                answers = [
                    work.create_task(self._sample(share, self._router.generate_alone))
                    for share in shares
                ]
            outcomes = {
                prompt_id: group
                for answer in answers
                for prompt_id, group in answer.result().items()
            }
            for prompt_id in prompt_ids:
                verdict = self._judge(outcomes[prompt_id])
                if isinstance(verdict, str):
                    dropped[prompt_id] = verdict
                else:
                    done[prompt_id] = verdict
        for (
            prompt_id,
            reason,
        ) in dropped.items():  # all at once: a checkpoint has the whole batch, or puts it again
            ledger.drop(prompt_id, reason)
        for prompt_id, group in sorted(done.items()):
            ledger.finish(prompt_id, group)
        self._before_batch = [*self._recent]

    async def _run_free(self, ledger: Ledger, step: int) -> None:
        """Admit prompt after prompt, as many as the bound and the rest of the run allow."""
        last = ledger.trained + (self._config.steps - step) * self._size

        async def sample(prompt_id: int) -> None:
            answer = await self._sample(
                [prompt_id], partial(self._router.generate, session=prompt_id)
            )
            verdict = self._judge(answer[prompt_id])
            if isinstance(verdict, str):
                ledger.drop(prompt_id, verdict)
            else:
                ledger.finish(prompt_id, verdict)
            self._changed.notify()

        async def evaluate_newest() -> None:
            wanted = step
            while wanted <= self._config.steps:
                await self._push.arrive(wanted)
                wanted = self._push.arrived + 1
                await self._evaluate(self._push.arrived)
            self._finish()

        async with background(evaluate_newest()) as work:
            while True:
                await self._changed.until(
                    lambda: ledger.admits(self._push.held) and ledger.trained + len(ledger) < last
                )
                work.create_task(sample(ledger.admit(self._push.held)))

    async def _sample(
        self, prompt_ids: list[int], generate: Generate
    ) -> dict[int, Group | GroupLost]:
        prompts = [training_prompt(self._task, prompt_id) for prompt_id in prompt_ids]
        samples = self._config.rollout.samples_per_prompt
        groups = await self._rollouter.collect(
            prompts, self._sampling, samples=samples, generate=generate
        )
        return dict(zip(prompt_ids, groups, strict=True))

    def _judge(self, outcome: Group | GroupLost) -> Group | str:
        """The group, or why it is not trained on.

        Raises RunError, with the last cause, where too many are lost.
        """
        self._recent.append(isinstance(outcome, GroupLost))
        if isinstance(outcome, GroupLost):
            most = self._config.rollout.max_lost * (self._recent.maxlen or 0)
            if sum(self._recent) > most:
                raise RunError(
                    f"{sum(self._recent)} of the last {len(self._recent)} groups were lost, more "
                    f"than rollout.max_lost={self._config.rollout.max_lost} allows; the last: "
                    f"{outcome}"
                ) from outcome
            return outcome.reason
        if (
            len({rollout.reward for rollout in outcome}) == 1
            and self._replaced < self._config.rollout.max_resampled_groups
        ):
            self._replaced += 1
            return "rewards all equal"
        return outcome


def sampling_of(rollout: RolloutConfig, task: Task) -> Sampling:
    """How the run's tokens are drawn."""
    return Sampling(
        max_tokens=rollout.max_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop_token_ids=task.stop_token_ids,
    )
