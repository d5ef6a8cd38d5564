"""Losses of Tinker's protocol. Each is a sum over the tokens of a datum.

The formulas are those of Tinker's documentation, for log-probs log p of the policy, log-probs log q
of the policy that sampled the tokens, ratios r = p / q and advantages A. A formula gets the columns
of a batch; each of its settings is a column too. sg(x) is x without a gradient.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torchtitan.config import Configurable

from rl.algorithms.loss_results import Metric, PerToken
from rl.algorithms.tokens import Tokens, sum_by_sequence

SAMPLED = "sampled_logprobs"
"""Column log q. The protocol names it ``logprobs``, which is an output here."""
STAND_IN = "stable_reinforce"
"""Loss whose formula is not public."""
SUM = "loss_sum"
"""Metric with the sum of the loss over all tokens."""
RATIO = (SAMPLED, "advantages")
CLIP = LOW, HIGH = "clip_low_threshold", "clip_high_threshold"
"""Least and greatest ratio of each token."""


def cross_entropy(tokens: Tokens) -> torch.Tensor:
    """-w log p, summed over the targets of a token. Weights w have any sign."""
    costs = -tokens["weights"] * tokens["logprobs"]
    return costs.sum(1) if costs.dim() > 1 else costs


def importance_sampling(tokens: Tokens) -> torch.Tensor:
    """-r A."""
    return -_log_ratio(tokens).exp() * tokens["advantages"]


def ppo(tokens: Tokens) -> torch.Tensor:
    """-min(r A, clip(r) A)."""
    return _clipped(tokens, _log_ratio(tokens))


def cispo(tokens: Tokens) -> torch.Tensor:
    """-sg(clip(r)) A log p."""
    low, high = (tokens[name].log() for name in CLIP)
    ratio = _log_ratio(tokens).detach().clamp(low, high).exp()
    return -ratio * tokens["advantages"] * tokens["logprobs"]


def gspo(tokens: Tokens) -> torch.Tensor:
    """-min(s A, clip(s) A) with one ratio s for each sequence: the geometric mean of the ratios of
    its tokens with ``sequence_ratio_mask`` other than 0. The gradient of s at each token is that of
    s p / sg(p).
    """
    logprobs = tokens["logprobs"]
    sequence = tokens["sequence"]
    counted = (tokens["sequence_ratio_mask"] != 0).to(logprobs)
    count = tokens.sequences
    sums = sum_by_sequence(_log_ratio(tokens).detach() * counted, sequence, count)
    mean = (sums / sum_by_sequence(counted, sequence, count))[sequence]
    return _clipped(tokens, logprobs - logprobs.detach() + mean)


def dro(tokens: Tokens) -> torch.Tensor:
    """-(A log p - beta / 2 (log p - log q)^2)."""
    penalty = tokens["beta"] / 2 * _log_ratio(tokens).square()
    return penalty - tokens["advantages"] * tokens["logprobs"]


def stable_reinforce(tokens: Tokens) -> torch.Tensor:
    """-sg(min(r, 1)) A log p + kl_coeff / 2 (log p - log q)^2: a stand-in, since Tinker's formula
    is not public.
    """
    log_ratio = _log_ratio(tokens)
    weight = log_ratio.detach().clamp(max=0).exp()
    penalty = tokens["kl_coeff"] / 2 * log_ratio.square()
    return penalty - weight * tokens["advantages"] * tokens["logprobs"]


def _log_ratio(tokens: Tokens) -> torch.Tensor:
    return tokens["logprobs"] - tokens[SAMPLED]


def _clipped(tokens: Tokens, log_ratio: torch.Tensor) -> torch.Tensor:
    """Return -min(r A, clip(r) A), [C]."""
    advantages = tokens["advantages"]
    floor, ceiling = (tokens[name].log() for name in CLIP)
    # Clip the logs: a ratio that overflows before the clip has the gradient 0 * inf = nan.
    floor = floor.masked_fill(advantages > 0, -math.inf)
    ceiling = ceiling.masked_fill(advantages < 0, math.inf)
    return -log_ratio.clamp(floor, ceiling).exp() * advantages


class Formula(NamedTuple):
    """Formula of a loss, and its columns beside ``logprobs``."""

    call: Callable[[Tokens], torch.Tensor]
    columns: tuple[str, ...] = RATIO
    """Columns that a datum must have."""
    settings: Mapping[str, float] = {}
    """Default of each column that is one number unless a datum has it."""


FORMULAS = {
    "cross_entropy": Formula(cross_entropy, ("weights",)),
    "importance_sampling": Formula(importance_sampling),
    "ppo": Formula(ppo, settings={LOW: 0.8, HIGH: 1.2}),
    "cispo": Formula(cispo, settings={LOW: 0.0, HIGH: 4.0}),
    "dro": Formula(dro, settings={"beta": 0.05}),
    "gspo": Formula(gspo, (*RATIO, "sequence_ratio_mask"), {LOW: 1 - 3e-4, HIGH: 1 + 4e-4}),
    STAND_IN: Formula(stable_reinforce, settings={"kl_coeff": 0.0}),
}
"""Losses by name. Tinker documents no defaults of ``dro`` and ``gspo``; those of ``gspo`` are of
arXiv:2507.18071.
"""


class TinkerLoss(Configurable):
    """Loss of a name of the protocol."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        name: str
        """Name of the formula."""

    def __init__(self, config: Config):
        self._formula = FORMULAS[config.name].call

    def __call__(self, tokens: Tokens) -> PerToken:
        """Return the loss of each token, [C], and their sum as a metric."""
        costs = self._formula(tokens)
        return costs, {SUM: Metric(costs, "sum")}
