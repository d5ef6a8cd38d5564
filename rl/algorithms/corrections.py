"""Weights of tokens that the trained policy would not quite have sampled: another engine's
rounding, older weights.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torchtitan.config import Configurable

from rl.algorithms.tokens import check_per_token, mean_by_sequence, sum_by_sequence
from rl.errors import RunError, naming, shown
from rl.rules import above, at_least

Level = Literal["token", "sequence"]

Weighed = tuple[torch.Tensor, dict[str, float]]
"""Weight of each token, float32 [C], and metrics."""


class Correction(Configurable):
    """Base of all weights that multiply a token's part of the surrogate. They are fixed for a batch
    before any update on it.

    To write your own, subclass this, with a Config of its own. Arguments, all [C] of a whole batch:
    log-probs of the policy before the update and of the one that sampled; optimizer steps between
    the two, at least 0; and the number of each token's sequence, int64 from 0.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        pass

    config: Config

    def __init__(self, config: Config):
        self.config = config

    def __call__(
        self,
        proximal: torch.Tensor,
        behaviour: torch.Tensor,
        staleness: torch.Tensor,
        sequence: torch.Tensor,
    ) -> Weighed:
        raise NotImplementedError


class TruncatedIS(Correction):
    """The importance ratio up to a cap: V-trace, arXiv:1802.01561, eq. 1.

    Between a sampler and a trainer that differ: Yao et al., "Your efficient RL framework secretly
    brings you off-policy RL training", 2025.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Correction.Config):
        cap: Annotated[float, above(0, 1e6)] = 2.0
        """Maximum weight."""

        level: Level = "token"
        """Level of the ratio. ``sequence`` uses one ratio for all tokens of a sequence, the product
        of theirs."""

    config: Config

    def __call__(
        self,
        proximal: torch.Tensor,
        behaviour: torch.Tensor,
        staleness: torch.Tensor,
        sequence: torch.Tensor,
    ) -> Weighed:
        log_ratio = proximal - behaviour
        cap = self.config.cap
        if self.config.level == "sequence":
            log_ratio = sum_by_sequence(log_ratio, sequence)[sequence]
        return log_ratio.exp().clamp(max=cap), {
            "correction/capped": _share(log_ratio > math.log(cap))
        }


class MaskedIS(Correction):
    """The importance ratio within a range and 0 outside: IcePop, arXiv:2510.18855."""

    @dataclass(kw_only=True, slots=True)
    class Config(Correction.Config):
        low: Annotated[float, at_least(0, 1e6)] = 0.5
        """Minimum ratio that is kept."""

        high: Annotated[float, above(0, 1e6)] = 2.0
        """Maximum ratio that is kept."""

        level: Level = "token"
        """Level of the ratio. ``sequence`` uses one ratio for all tokens of a sequence, their
        geometric mean, so that it is kept or dropped as a whole."""

        weigh: bool = True
        """Whether to weight kept tokens by their ratio. False weights them by 1, for use with
        another correction."""

    config: Config

    def __call__(
        self,
        proximal: torch.Tensor,
        behaviour: torch.Tensor,
        staleness: torch.Tensor,
        sequence: torch.Tensor,
    ) -> Weighed:
        log_ratio = proximal - behaviour
        config = self.config
        if config.level == "sequence":
            log_ratio = mean_by_sequence(log_ratio, sequence)[sequence]
        ratio = log_ratio.exp()
        inside = (ratio >= config.low) & (ratio <= config.high)
        return torch.where(inside, ratio if config.weigh else 1.0, 0.0), {}


class StalenessDecay(Correction):
    """Factor for each optimizer step by which the weights that drew the token were behind."""

    @dataclass(kw_only=True, slots=True)
    class Config(Correction.Config):
        decay: Annotated[float, above(0, 1)] = 0.9
        """Weight of a token that is one step old."""

    config: Config

    def __call__(
        self,
        proximal: torch.Tensor,
        behaviour: torch.Tensor,
        staleness: torch.Tensor,
        sequence: torch.Tensor,
    ) -> Weighed:
        return self.config.decay ** staleness.float(), {}


def correction_weights(
    corrections: Sequence[Correction],
    proximal: torch.Tensor,
    behaviour: torch.Tensor,
    staleness: torch.Tensor,
    sequence: torch.Tensor,
) -> Weighed:
    """The product of all corrections, with its mean and the share of tokens that it masks.

    Raises RunError that names a correction that returns something else than it should.
    """
    weights = torch.ones_like(proximal)
    metrics = dict[str, float]()
    for correction in corrections:
        whose = f"algorithm.corrections: {type(correction).__name__}"
        with naming(whose):
            weighed = correction(proximal, behaviour, staleness, sequence)
        if not (isinstance(weighed, tuple) and len(weighed) == 2 and isinstance(weighed[1], dict)):
            raise RunError(
                f"{whose} returned {shown(weighed)}; expected are a tensor and a dict of metrics"
            )
        weights = weights * check_per_token(whose, weighed[0], len(proximal))
        with naming(f"{whose}: its metrics {shown(weighed[1])}"):
            metrics |= {str(name): float(value) for name, value in weighed[1].items()}
    return weights, {
        **metrics,
        "correction/mean": weights.mean().item(),
        "correction/masked": _share(weights == 0),
    }


def _share(chosen: torch.Tensor) -> float:
    return chosen.float().mean().item()
