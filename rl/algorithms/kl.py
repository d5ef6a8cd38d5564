"""Estimates of the KL divergence of two policies, and adaptation of its coefficient."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torchtitan.config import Configurable

from rl.types.rules import above, at_least

Estimator = Literal["k1", "k2", "k3"]


def kl(logprobs: torch.Tensor, reference: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    """Estimate KL(policy || reference) [C], in nats, from log-probs [C] of tokens that the policy
    drew.

    The estimators are from joschu.net/blog/kl-approx.html; their gradients, as a term of a loss on
    the policy's own tokens, from arXiv:2506.09477:

    - k1: unbiased. Its gradient is 0 on average, so use it in rewards only.
    - k2: biased, but only slightly if the policies are close. Its gradient is the gradient
      of KL(policy || reference).
    - k3: unbiased, never negative, and with a lower variance than k1. Its gradient is the
      gradient of KL(reference || policy).
    """
    log_ratio = logprobs - reference
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    return (-log_ratio).exp() - 1 + log_ratio


class AdaptiveKL(Configurable):
    """Adaptation of a KL penalty's coefficient that keeps the KL near a target; arXiv:1909.08593,
    section 2.2.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        target: Annotated[float, at_least(0, 1e6)] = 0.0
        """KL to hold, in nats per token; 0 keeps the coefficient constant."""

        rate: Annotated[float, at_least(0, 1e6)] = 0.1
        """Relative change of the coefficient per unit of relative error; K in the paper."""

        clip: Annotated[float, above(0, 1e6)] = 0.2
        """Maximum size of the relative error, observed / target - 1; larger errors are clipped."""

    def __init__(self, config: Config):
        self.config = config

    def update(self, coef: float, observed: float) -> float:
        """Return the next step's coefficient from this step's coefficient and observed KL."""
        config = self.config
        if not config.target:
            return coef
        error = min(max(observed / config.target - 1, -config.clip), config.clip)
        return coef * (1 + config.rate * error)
