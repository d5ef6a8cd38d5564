"""How far two policies are apart, and how hard they are held together."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torchtitan.config import Configurable

from rl.rules import above, at_least

Estimator = Literal["k1", "k2", "k3"]


def kl(logprobs: torch.Tensor, reference: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    """Estimate [C] of KL(policy || reference), in nats, from log-probs [C] of tokens that the
    policy drew.

    Of joschu.net/blog/kl-approx.html. Values: k1 and k3 are unbiased, k3 is never negative and
    varies less; k2 is biased, little where the policies are near. Gradients, as a term of a loss on
    the policy's own tokens (arXiv:2506.09477): k2's is that of KL(policy || reference); k3's that
    of KL(reference || policy); k1's is that of nothing, 0 on average, so k1 is one for rewards
    alone.
    """
    log_ratio = logprobs - reference
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    return (-log_ratio).exp() - 1 + log_ratio


class AdaptiveKL(Configurable):
    """Adaptation of the coefficient of a KL penalty so that the KL stays near a target;
    arXiv:1909.08593, section 2.2.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        target: Annotated[float, at_least(0, 1e6)] = 0.0
        """KL to hold, in nats per token; 0 keeps the coefficient constant."""

        rate: Annotated[float, at_least(0, 1e6)] = 0.1
        """Rate at which the coefficient follows, K in the paper."""

        clip: Annotated[float, above(0, 1e6)] = 0.2
        """Maximum relative error that is acted on."""

    def __init__(self, config: Config):
        self.config = config

    def update(self, coef: float, observed: float) -> float:
        """The next step's coefficient, from this step's and the KL that was observed with it."""
        config = self.config
        if not config.target:
            return coef
        error = min(max(observed / config.target - 1, -config.clip), config.clip)
        return coef * (1 + config.rate * error)
