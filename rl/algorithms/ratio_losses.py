"""Losses that bound the importance ratio other than by PPO's clip: SAPO and GMPO."""

from dataclasses import dataclass
from typing import Annotated

import torch

from rl.algorithms.losses import CLIP, ClippedLoss, Metric, PerToken, PolicyLoss, multiple_of
from rl.algorithms.tokens import Tokens, mean_by_sequence
from rl.types.rules import above


class SAPOLoss(PolicyLoss):
    """-f(r) A for f(r) = 4 / tau * sigmoid(tau (r - 1)), a soft gate in place of the clip: SAPO,
    arXiv:2511.20347.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(PolicyLoss.Config):
        tau_positive: Annotated[float, above(0, 1e6)] = 1.0
        """Tau of tokens with advantages above 0; a higher one closes the gate sooner."""

        tau_negative: Annotated[float, above(0, 1e6)] = 1.05
        """Tau of all other tokens."""

    config: Config

    @multiple_of("advantages")
    def surrogate(self, tokens: Tokens) -> PerToken:
        advantages = tokens["advantages"]
        config = self.config
        tau = torch.where(advantages > 0, config.tau_positive, config.tau_negative)
        # Limit the log: a ratio that overflows has the gradient 0 * inf = nan.
        ratio = self.log_ratio(tokens).clamp(max=80.0).exp()
        gate = torch.sigmoid(tau * (ratio - 1))
        return -4 / tau * gate * advantages, {"ratio/gate": Metric(4 * gate * (1 - gate), "mean")}


class GMPOLoss(ClippedLoss):
    """-A times the geometric mean of a sequence's clipped ratios: GMPO, arXiv:2507.20673.

    As in PPO a ratio is clipped only on the side to which the advantage moves it. The clip is per
    token, before the mean, in contrast to GSPO.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ClippedLoss.Config):
        clip_low: Annotated[float, CLIP] = 0.32968
        """Distance below 1 at which a token's ratio is clipped; the default is at exp(-0.4)."""

        clip_high: Annotated[float, CLIP] = 0.491825
        """Distance above 1 at which a token's ratio is clipped; the default is at exp(0.4)."""

    config: Config

    @multiple_of("advantages")
    def surrogate(self, tokens: Tokens) -> PerToken:
        log_ratio, metrics = self.clipped(tokens)
        sequence = tokens["sequence"]
        mean = mean_by_sequence(log_ratio, sequence, tokens.sequences)[sequence]
        return -mean.exp() * tokens["advantages"], metrics
