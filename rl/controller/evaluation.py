"""Held-out prompts: greedy, and pass@k."""

import dataclasses
from collections.abc import Sequence

from rl.config import RunConfig
from rl.controller.ledger import Group
from rl.controller.router import Router
from rl.controller.sampler import sampling_of
from rl.errors import GroupLost
from rl.rollout.rollouter import Rollouter
from rl.tasks.base import Task
from rl.types import Prompt, Sampling


class Evaluation:
    """Asks the generators prompts that training never sees, with seeds of a stream of their own."""

    def __init__(self, config: RunConfig, task: Task, rollouter: Rollouter, router: Router):
        self._config, self._steps, self._task = config.evaluation, config.steps, task
        self._sampling = sampling_of(config.rollout, task)
        self._rollouter, self._router = rollouter, router

    def is_due(self, step: int) -> bool:
        """Whether the weights after ``step`` are evaluated on the way."""
        return self._config.every > 0 and 0 < step < self._steps and step % self._config.every == 0

    async def scores(self) -> dict[str, float]:
        """``eval/exact_match`` of greedy completions; ``eval/pass@k``: prompts that one of k samples solves.

        Empty where ``config.prompts`` is 0. A prompt whose reward fails counts as one that is not solved.
        """
        if self._config.prompts == 0:
            return {}
        prompts = self._task.eval_prompts(self._config.prompts)
        greedy = dataclasses.replace(self._sampling, temperature=0.0)
        groups = await self._ask(prompts, greedy, samples=1, stream="eval/greedy")
        scores = {
            "eval/prompts": float(len(prompts)),
            "eval/exact_match": _solved(groups) / len(prompts),
            "eval/reward_mean": sum(group[0].reward for group in groups) / max(len(groups), 1),
        }
        if samples := self._config.samples:
            groups = await self._ask(prompts, self._sampling, samples=samples, stream="eval/sampled")
            scores[f"eval/pass@{samples}"] = _solved(groups) / len(prompts)
        return scores

    async def _ask(self, prompts: Sequence[Prompt], sampling: Sampling, *, samples: int, stream: str) -> list[Group]:
        groups = await self._rollouter.collect(
            prompts, sampling, samples=samples, stream=stream, generate=self._router.generate
        )
        return [group for group in groups if not isinstance(group, GroupLost)]


def _solved(groups: list[Group]) -> int:
    return sum(any(rollout.metrics["exact"] for rollout in group) for group in groups)
