"""Held-out prompts: greedy, and pass@k."""

import asyncio
import dataclasses

from rl.config import EvaluationConfig, RunConfig
from rl.controller.ledger import Group
from rl.controller.router import Router
from rl.controller.sampler import sampling_of
from rl.controller.together import beside
from rl.errors import GroupLost, RunError
from rl.rollout.prompts import eval_prompts
from rl.rollout.rollouter import Rollouter
from rl.tasks.base import Task
from rl.types import Completion, GenerationRequest, Prompt, Sampling


class Evaluation:
    """Asks the generators prompts that training never sees, with seeds of a stream of their own.

    The prompts are cut into shares, at least one for each replica, whose requests an engine can run at once. A replica
    is asked one share at a time, so that no call takes longer because there are more prompts. In a deterministic
    pipeline a replica answers a share alone and without cached prefixes, as in training, so that the scores depend on
    the config and the weights.
    """

    def __init__(self, config: RunConfig, task: Task, rollouter: Rollouter, router: Router):
        self._config, self._steps = config.evaluation, config.steps
        self._prompts = held_out_prompts(config.evaluation, task)
        self._sampling = sampling_of(config.rollout, task)
        self._rollouter = rollouter
        self._replicas, self._at_once = config.generator.replicas, config.generator.max_running_requests
        self._asking = asyncio.Semaphore(self._replicas)
        alone = config.rollout.pipeline == "deterministic"
        self._generate = router.generate_alone if alone else router.generate

    def is_due(self, step: int) -> bool:
        """Whether the weights after ``step`` are evaluated on the way."""
        on_the_way = bool(self._prompts) and self._config.every > 0 and 0 < step < self._steps
        return on_the_way and step % self._config.every == 0

    async def scores(self) -> dict[str, float]:
        """``eval/exact_match`` of greedy completions; ``eval/pass@k``: prompts that one of k samples solves.

        Empty where ``config.prompts`` is 0. A prompt whose reward fails counts as one that is not solved.
        """
        if not self._prompts:
            return {}
        count = len(self._prompts)
        groups = await self._ask(dataclasses.replace(self._sampling, temperature=0.0), 1, "eval/greedy")
        scores = {
            "eval/prompts": float(count),
            "eval/exact_match": _solved(groups) / count,
            "eval/reward_mean": sum(group[0].reward for group in groups) / max(len(groups), 1),
        }
        if samples := self._config.samples:
            groups = await self._ask(self._sampling, samples, "eval/sampled")
            scores[f"eval/pass@{samples}"] = _solved(groups) / count
        return scores

    async def _ask(self, sampling: Sampling, samples: int, stream: str) -> list[Group]:
        """Scored samples of each prompt, in order, without prompts whose reward failed."""
        size = min(-(-len(self._prompts) // self._replicas), max(1, self._at_once // samples))
        async with beside() as work:
            shares = [
                work.create_task(
                    self._rollouter.collect(
                        self._prompts[first : first + size],
                        sampling,
                        samples=samples,
                        stream=stream,
                        generate=self._generate_in_turn,
                    )
                )
                for first in range(0, len(self._prompts), size)
            ]
        groups = [group for share in shares for group in share.result()]
        return [group for group in groups if not isinstance(group, GroupLost)]

    async def _generate_in_turn(self, requests: list[GenerationRequest]) -> list[Completion]:
        async with self._asking:
            return await self._generate(requests)


def held_out_prompts(config: EvaluationConfig, task: Task) -> list[Prompt]:
    """Prompts of each evaluation, none if ``config.prompts`` is 0. Raises RunError for prompts that cannot be used."""
    if config.prompts == 0:
        return []
    if prompts := eval_prompts(task, config.prompts):
        return prompts
    name = type(task).__name__
    raise RunError(
        f"evaluation.prompts is {config.prompts}, but {name} holds out no prompts; set it to 0 for no evaluation"
    )


def _solved(groups: list[Group]) -> int:
    return sum(any(rollout.metrics["exact"] for rollout in group) for group in groups)
