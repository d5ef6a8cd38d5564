"""Per-token losses. The trainer weighs, sums and divides them; a loss only says what each token costs."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torchtitan.config import Configurable


class Metric(NamedTuple):
    """A per-token value and how it is reduced over the tokens of weight > 0, on all ranks."""

    values: torch.Tensor
    reduction: Literal["mean", "max", "min"]


class PolicyLoss(Configurable):
    """Clipped policy-gradient loss, with an entropy bonus and a penalty for leaving a reference policy.

    GRPO: arXiv:2402.03300, eq. 3 and 4 (one clip range, mean over each sequence, then over sequences).
    DAPO: arXiv:2503.14476, eq. 8 (``clip_high`` above ``clip_low``, mean over all tokens).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        clip_low: float = 0.2
        """The importance ratio is clipped below at ``1 - clip_low``."""

        clip_high: float = 0.2
        """The importance ratio is clipped above at ``1 + clip_high``."""

        entropy_coef: float = 0.0
        """Bonus per token: this times the entropy (nats) of the distribution sampled from."""

        kl_coef: float = 0.0
        """Penalty per token: this times the k3 estimate of the divergence from the reference policy."""

        reduction: Literal["sequence_mean", "token_mean"] = "sequence_mean"
        """sequence_mean: every completion counts alike. token_mean: every token counts alike."""

    def __init__(self, config: Config):
        self.config = config

    def __call__(
        self, logprobs: torch.Tensor, entropy: torch.Tensor, columns: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, Metric]]:
        """Loss per token and its metrics.

        ``logprobs``, ``entropy`` and the columns ``advantages`` and ``behaviour_logprobs`` are
        float32 [C], and so is the loss; with ``kl_coef``, so is ``reference_logprobs``.
        """
        config, advantages = self.config, columns["advantages"]
        log_ratio = logprobs - columns["behaviour_logprobs"]
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
        surrogate = torch.minimum(ratio * advantages, clipped * advantages)
        loss = -surrogate - config.entropy_coef * entropy
        metrics = {
            "entropy/mean": Metric(entropy, "mean"),
            "ratio/mean": Metric(ratio, "mean"),
            "ratio/max": Metric(ratio, "max"),
            "logprob/error_max": Metric(log_ratio.abs(), "max"),
            "ratio/clipped": Metric((clipped != ratio).float(), "mean"),
            "kl/behaviour": Metric(k3(columns["behaviour_logprobs"], logprobs), "mean"),
        }
        if config.kl_coef:
            kl = k3(logprobs, columns["reference_logprobs"])
            loss = loss + config.kl_coef * kl
            metrics["kl/reference"] = Metric(kl, "mean")
        return loss, metrics


def k3(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Estimate of KL(policy || reference) per token, never negative; joschu.net/blog/kl-approx.html."""
    log_ratio = reference - logprobs
    return log_ratio.exp() - 1 - log_ratio


def grpo(**fields: float) -> PolicyLoss.Config:
    """GRPO's loss; any field of PolicyLoss.Config may be given."""
    return PolicyLoss.Config(**fields)  # type: ignore[arg-type]


def dapo(**fields: float) -> PolicyLoss.Config:
    """DAPO's loss: clip-higher and the mean over tokens; any field may be given."""
    return PolicyLoss.Config(**{"clip_high": 0.28, "reduction": "token_mean", **fields})  # type: ignore[arg-type]


def token_weights(lengths: torch.Tensor, reduction: str) -> torch.Tensor:
    """Weight of each completion's tokens, float32 [N], for completions of ``lengths`` int64 [N].

    The weighted sum of token losses over the sum of weights is then the mean that ``reduction``
    names.
    """
    if reduction == "token_mean":
        return torch.ones(len(lengths))
    return 1.0 / lengths.clamp(min=1).float()
