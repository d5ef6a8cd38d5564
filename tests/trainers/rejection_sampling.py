"""An algorithm of the user's own: the policy imitates the best completions of each prompt."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torchtitan.config import Configurable

from configs.quickstart import quickstart
from rl.algorithms.batch import counts_of
from rl.algorithms.losses import ImportanceSamplingLoss
from rl.config import RLConfig
from rl.trainers.algorithm import Algorithm
from rl.types import Batch, Rollout
from rl.types.rules import at_least


class RejectionSampling(Algorithm):
    """Learns from completions that beat the mean of their group by ``margin``, and no others."""

    @dataclass(kw_only=True, slots=True)
    class Config(Algorithm.Config):
        margin: Annotated[float, at_least(0, 100)] = 0.05
        """Reward above the group's mean from which on a completion is imitated."""

    config: Config

    def loss(self, role: str) -> Configurable.Config:
        return ImportanceSamplingLoss.Config()

    def score(
        self, batch: Batch, rollouts: Sequence[Rollout], rewards: torch.Tensor
    ) -> dict[str, float]:
        prompts = torch.tensor([rollout.prompt.prompt_id for rollout in rollouts])
        _, group = prompts.unique(return_inverse=True)
        sums = torch.zeros(len(rollouts)).index_add(0, group, rewards)
        means = sums / group.bincount(minlength=len(rollouts)).clamp(min=1)
        kept = (rewards - means[group] > self.config.margin).float()
        batch.columns["advantages"] = batch.scatter(kept.repeat_interleave(counts_of(rollouts)))
        return {"rejection/kept": float(kept.mean())}


def rejection_sampling() -> RLConfig:
    config = quickstart()
    config.algorithm = RejectionSampling.Config()
    return config
