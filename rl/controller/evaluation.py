"""Held-out prompts: greedy, and pass@k."""

import dataclasses
from typing import TYPE_CHECKING

from rl.rollout.rollouter import Rollouter
from rl.tasks.base import Task
from rl.types import Sampling

if TYPE_CHECKING:
    from rl.config import EvaluationConfig


async def evaluate(
    rollouter: Rollouter, task: Task, config: "EvaluationConfig", sampling: Sampling
) -> dict[str, float]:
    """``eval/exact_match`` of greedy completions; ``eval/pass@k``: prompts that one of k samples solves.

    Empty where ``config.prompts`` is 0.
    """
    if config.prompts == 0:
        return {}
    prompts = task.eval_prompts(config.prompts)
    greedy = dataclasses.replace(sampling, temperature=0.0)
    groups = await rollouter.collect(prompts, greedy, samples=1, stream="eval/greedy")
    scores = {
        "eval/prompts": float(len(prompts)),
        "eval/exact_match": sum(group[0].metrics["exact"] for group in groups) / len(groups),
        "eval/reward_mean": sum(group[0].reward for group in groups) / len(groups),
    }
    if config.samples:
        groups = await rollouter.collect(prompts, sampling, samples=config.samples, stream="eval/sampled")
        solved = sum(any(rollout.metrics["exact"] for rollout in group) for group in groups)
        scores[f"eval/pass@{config.samples}"] = solved / len(groups)
    return scores
