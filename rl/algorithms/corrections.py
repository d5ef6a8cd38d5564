"""Weights that correct for tokens drawn by a slightly different policy: another engine's rounding,
or older weights.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor
from torchtitan.config import Configurable

from rl.algorithms.tokens import check_per_token, mean_by_sequence, sum_by_sequence
from rl.errors import RunError, naming, shown
from rl.metrics import Entry, Value
from rl.types.rules import above, at_least

Level = Literal["token", "sequence"]

Weighted = tuple[Tensor, dict[str, Entry]]
"""Weight of each token, float32 [C], and metrics. A float is averaged over all tokens."""


class Correction(Configurable):
    """Base class of weights that multiply each token's surrogate loss. The weights of a batch are
    computed once, before the first update on the batch.

    To write your own, subclass it and give the subclass its own Config. Arguments, each [C] over a
    whole batch:

    - ``proximal``: log-probs of the policy before the update
    - ``behaviour``: log-probs of the policy that sampled
    - ``staleness``: optimizer steps between these two policies, at least 0
    - ``sequence``: index of each token's sequence, int64 from 0
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        pass

    config: Config

    def __init__(self, config: Config):
        self.config = config

    def __call__(
        self, proximal: Tensor, behaviour: Tensor, staleness: Tensor, sequence: Tensor
    ) -> Weighted:
        raise NotImplementedError


class TruncatedIS(Correction):
    """Importance ratio, truncated at ``cap``: V-trace, arXiv:1802.01561, eq. 1.

    For a generator and a trainer that compute different log-probs: Yao et al., "Your efficient RL
    framework secretly brings you off-policy RL training", 2025.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Correction.Config):
        cap: Annotated[float, above(0, 1e6)] = 2.0
        """Maximum weight."""

        level: Level = "token"
        """Level of the ratio. ``sequence`` uses one ratio for all tokens of a sequence, the product
        of the token ratios."""

    config: Config

    def __call__(
        self, proximal: Tensor, behaviour: Tensor, staleness: Tensor, sequence: Tensor
    ) -> Weighted:
        log_ratio = proximal - behaviour
        cap = self.config.cap
        if self.config.level == "sequence":
            log_ratio = sum_by_sequence(log_ratio, sequence)[sequence]
        metrics: dict[str, Entry] = {"correction/capped": _share(log_ratio > math.log(cap))}
        return log_ratio.exp().clamp(max=cap), metrics


class MaskedIS(Correction):
    """Importance ratio if it is within a range, otherwise 0: IcePop, arXiv:2510.18855."""

    @dataclass(kw_only=True, slots=True)
    class Config(Correction.Config):
        low: Annotated[float, at_least(0, 1e6)] = 0.5
        """Minimum ratio that is kept."""

        high: Annotated[float, above(0, 1e6)] = 2.0
        """Maximum ratio that is kept."""

        level: Level = "token"
        """Level of the ratio. ``sequence`` uses one ratio for all tokens of a sequence, the
        geometric mean of the token ratios, so that a sequence is kept or dropped as a whole."""

        weigh: bool = True
        """Whether to weight kept tokens by their ratio. False weights them by 1, for use with
        another correction."""

    config: Config

    def __call__(
        self, proximal: Tensor, behaviour: Tensor, staleness: Tensor, sequence: Tensor
    ) -> Weighted:
        log_ratio = proximal - behaviour
        config = self.config
        if config.level == "sequence":
            log_ratio = mean_by_sequence(log_ratio, sequence)[sequence]
        ratio = log_ratio.exp()
        inside = (ratio >= config.low) & (ratio <= config.high)
        return torch.where(inside, ratio if config.weigh else 1.0, 0.0), {}


class StalenessDecay(Correction):
    """``decay`` to the power of the token's staleness, in optimizer steps."""

    @dataclass(kw_only=True, slots=True)
    class Config(Correction.Config):
        decay: Annotated[float, above(0, 1)] = 0.9
        """Weight of a token that is one step old."""

    config: Config

    def __call__(
        self, proximal: Tensor, behaviour: Tensor, staleness: Tensor, sequence: Tensor
    ) -> Weighted:
        return self.config.decay ** staleness.float(), {}


def correction_weights(
    corrections: Sequence[Correction],
    proximal: Tensor,
    behaviour: Tensor,
    staleness: Tensor,
    sequence: Tensor,
) -> Weighted:
    """Return the product of all corrections, and metrics: those of each correction, the mean
    weight, and the share of tokens with weight 0.

    Raises RunError, naming the correction, if a correction does not return weights and metrics.
    """
    weights = torch.ones_like(proximal)
    metrics = dict[str, Entry]()
    for correction in corrections:
        name = f"algorithm.corrections: {type(correction).__name__}"
        with naming(name):
            result = correction(proximal, behaviour, staleness, sequence)
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            wrong = f"{name} returned {shown(result)}"
            raise RunError(f"{wrong}; expected are a tensor and a dict of metrics")
        weights = weights * check_per_token(name, result[0], len(proximal))
        with naming(f"{name}: its metrics {shown(result[1])}"):
            metrics |= {
                str(key): value if isinstance(value, Value) else float(value)
                for key, value in result[1].items()
            }
    metrics["correction/mean"] = weights.mean().item()
    metrics["correction/masked"] = _share(weights == 0)
    return weights, metrics


def _share(chosen: Tensor) -> float:
    return chosen.float().mean().item()
