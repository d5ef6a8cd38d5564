"""Per-token losses.

A loss computes the cost of each token; the trainer weights, sums and divides the costs.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import torch
from torchtitan.config import Configurable

from rl.algorithms.kl import Estimator, kl
from rl.algorithms.loss_results import Metric as Metric
from rl.algorithms.loss_results import PerToken as PerToken
from rl.algorithms.tokens import Tokens, mean_by_sequence
from rl.types.rules import SHARE, SIGNED, above, at_least

CLIP = at_least(0, 1e6)
Surrogate = TypeVar("Surrogate", bound=Callable[..., PerToken])
Reduction = Literal["sequence_mean", "token_mean", "fixed_length"]


def multiple_of(column: str) -> Callable[[Surrogate], Surrogate]:
    """Declare that the cost of each token that ``surrogate`` returns is a multiple of ``column`` of
    the batch. A subclass with a ``surrogate`` of its own declares its own.
    """

    def declare(surrogate: Surrogate) -> Surrogate:
        surrogate.factor = column  # type: ignore[attr-defined]
        return surrogate

    return declare


class PolicyLoss(Configurable):
    """Base class of policy losses, with an entropy bonus and a KL penalty against a reference
    policy.

    To write your own, subclass it, give the subclass its own Config, and define ``surrogate``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        needs_proximal: ClassVar[bool] = False
        """Whether the loss reads ``proximal_logprobs``, whatever the algorithm's ratio is."""

        @property
        def needs_reference(self) -> bool:
            """Whether the loss reads ``reference_logprobs``."""
            return self.kl_coef > 0

        entropy_coef: Annotated[float, SIGNED] = 0.0
        """Coefficient of the entropy bonus. The bonus of a token is the entropy, in nats, of the
        distribution that the token is sampled from."""

        kl_coef: Annotated[float, at_least(0, 1e6)] = 0.0
        """Coefficient of the KL penalty. The penalty of a token is the estimated divergence from
        the reference policy."""

        kl_estimator: Estimator = "k3"
        """Estimator of this divergence. ``k1`` is refused: its gradient is 0 on average."""

        reduction: Reduction = "sequence_mean"
        """Reduction of the tokens' losses.

        - ``sequence_mean``: Every completion has the same weight.
        - ``token_mean``: Every token has the same weight.
        - ``fixed_length``: Sums are divided by max_tokens, so that long completions have more
          weight (Dr. GRPO).
        """

    config: Config

    def __init__(self, config: Config):
        self.config = config

    def __call__(self, tokens: Tokens) -> PerToken:
        """Return the loss of each token, [C]: surrogate * correction - entropy bonus + KL penalty.

        The column ``correction`` is optional.
        """
        config = self.config
        loss, metrics = self.surrogate(tokens)
        if "correction" in tokens:
            loss = loss * tokens["correction"]
        loss = loss - config.entropy_coef * tokens["entropy"]
        if config.kl_coef:
            penalty = kl(tokens["logprobs"], tokens["reference_logprobs"], config.kl_estimator)
            loss = loss + config.kl_coef * penalty
        return loss, {**self._metrics(tokens), **metrics}

    def surrogate(self, tokens: Tokens) -> PerToken:
        """Return the cost of each token to minimize, [C], and metrics. If the cost is a multiple of
        a column of the batch, declare it by :func:`multiple_of`.
        """
        raise NotImplementedError

    def zero_gradient(self, columns: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Return whether the cost of each token is a multiple of 0, so that the trainer computes no
        gradient for a sequence of such tokens; None if a term has no known factor.
        """
        config = self.config
        overrides = type(self).__call__ is not PolicyLoss.__call__
        if overrides or config.entropy_coef or config.kl_coef:
            return None
        factors = (getattr(self.surrogate, "factor", ""), "correction")
        zeros = [columns[name] == 0 for name in factors if name in columns]
        return torch.stack(zeros).any(0) if zeros else None

    def log_ratio(self, tokens: Tokens) -> torch.Tensor:
        """Return the log of the importance ratio, [C]. The denominator is the proximal policy if
        the batch has ``proximal_logprobs``, otherwise the policy that sampled the tokens.
        """
        old = "proximal_logprobs" if "proximal_logprobs" in tokens else "behaviour_logprobs"
        return tokens["logprobs"] - tokens[old]

    @torch.no_grad()
    def _metrics(self, tokens: Tokens) -> dict[str, Metric]:
        metrics = {"entropy/mean": Metric(tokens["entropy"], "mean")}
        logprobs = tokens["logprobs"]
        if "behaviour_logprobs" in tokens:
            behaviour = tokens["behaviour_logprobs"]
            ratio = self.log_ratio(tokens).exp()
            error = (logprobs - behaviour).abs()
            current = tokens["staleness"] == 0 if "staleness" in tokens else None
            metrics |= {
                "ratio/mean": Metric(ratio, "mean"),
                "ratio/max": Metric(ratio, "max"),
                "kl/behaviour": Metric(kl(behaviour, logprobs, "k3"), "mean"),
                "logprob/error_mean": Metric(error, "mean", current),
                "logprob/error_max": Metric(error, "max", current),
                "logprob/differing_tokens": Metric((error != 0).float(), "sum", current),
            }
            if current is not None:  # drift is of tokens that older weights drew
                metrics["logprob/drift_max"] = Metric(error, "max", ~current)
        if "reference_logprobs" in tokens:
            divergence = kl(logprobs, tokens["reference_logprobs"], "k3")
            metrics["kl/reference"] = Metric(divergence, "mean")
        return metrics


class ClippedLoss(PolicyLoss):
    """-min(r A, clip(r) A) for importance ratios r and advantages A: PPO, arXiv:1707.06347, eq. 7.

    GRPO: arXiv:2402.03300, eq. 3 (one clip range, mean over each sequence, then over sequences).
    DAPO: arXiv:2503.14476, eq. 8 (``clip_high`` above ``clip_low``, mean over all tokens).
    Dual clip: arXiv:1912.09729, eq. 5.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(PolicyLoss.Config):
        clip_low: Annotated[float, CLIP] = 0.2
        """Distance below 1 at which the importance ratio is clipped."""

        clip_high: Annotated[float, CLIP] = 0.2
        """Distance above 1 at which the importance ratio is clipped."""

        dual_clip: Annotated[float, above(1, 1e6, also=(0,))] = 0.0
        """Upper limit of the ratio for negative advantages, above 1; 0 for no limit."""

    config: Config

    @multiple_of("advantages")
    def surrogate(self, tokens: Tokens) -> PerToken:
        clipped, metrics = self.clipped(tokens)
        return -clipped.exp() * tokens["advantages"], metrics

    def clipped(self, tokens: Tokens) -> PerToken:
        """Return the log of each ratio, [C], clipped where the advantage moves it, and metrics."""
        advantages = tokens["advantages"]
        log_ratio = self.log_ratio(tokens)
        low, high = _log_range(self.config.clip_low, self.config.clip_high)
        dual = math.log(self.config.dual_clip) if self.config.dual_clip else math.inf
        # Clip the logs: a ratio that overflows before the clip has the gradient 0 * inf = nan.
        floor = torch.where(advantages > 0, -math.inf, low)
        ceiling = torch.where(advantages < 0, dual, high)
        return log_ratio.clamp(floor, ceiling), {"ratio/clipped": _share(log_ratio, low, high)}


class DecoupledLoss(ClippedLoss):
    """-w min(r A, clip(r) A), the decoupled objective of PPO, for r = p / p_proximal and the
    behaviour weight w = min(p_proximal / p_behaviour, cap), which has no gradient.

    The objective without cap: Hilton et al., "Batch size-invariance for policy optimization",
    arXiv:2110.00641, section 3. For generators with older weights: AReaL, arXiv:2505.24298. The
    proximal policy is the trainer's policy before the step's first update. The behaviour policy is
    the generators' policy.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ClippedLoss.Config):
        needs_proximal: ClassVar[bool] = True

        behaviour_cap: Annotated[float, above(0, 1e6)] = 5.0
        """Maximum behaviour weight."""

    config: Config

    @multiple_of("advantages")
    def surrogate(self, tokens: Tokens) -> PerToken:
        cap = math.log(self.config.behaviour_cap)
        log_weight = tokens["proximal_logprobs"] - tokens["behaviour_logprobs"]
        weight = log_weight.clamp(max=cap).exp()
        loss, metrics = super().surrogate(tokens)
        metrics["behaviour/weight"] = Metric(weight, "mean")
        metrics["behaviour/capped"] = Metric((log_weight > cap).float(), "mean")
        return weight * loss, metrics


class GSPOLoss(ClippedLoss):
    """Clipped loss with one ratio per sequence, the geometric mean of the token ratios: GSPO,
    arXiv:2507.18071, eq. 5-7.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ClippedLoss.Config):
        clip_low: Annotated[float, CLIP] = 3e-4
        """Distance below 1 at which the sequence's ratio is clipped."""

        clip_high: Annotated[float, CLIP] = 4e-4
        """Distance above 1 at which the sequence's ratio is clipped."""

        token_level: bool = False
        """Whether to use GSPO-token, eq. 13 and 14: the sequence's ratio, with each token's own
        gradient, for advantages that differ within a sequence."""

    config: Config

    def log_ratio(self, tokens: Tokens) -> torch.Tensor:
        """Return the log of the ratio of each token's sequence, [C]."""
        logprobs = tokens["logprobs"]
        sequence = tokens["sequence"]
        mean = mean_by_sequence(super().log_ratio(tokens), sequence, tokens.sequences)[sequence]
        return logprobs - logprobs.detach() + mean.detach() if self.config.token_level else mean


class CISPOLoss(PolicyLoss):
    """-sg(clip(r)) A log p, where sg stops the gradient: CISPO, arXiv:2506.13585, eq. 4 and 5.

    The ratio is clipped, but every token keeps its gradient.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(PolicyLoss.Config):
        clip_low: Annotated[float, CLIP] = 1.0
        """Distance below 1 at which the ratio is clipped. The default does not clip it, as in the
        paper."""

        clip_high: Annotated[float, CLIP] = 4.0
        """Distance above 1 at which the ratio is clipped."""

        reduction: Reduction = "token_mean"
        """Reduction of the tokens' losses, as in PolicyLoss."""

    config: Config

    @multiple_of("advantages")
    def surrogate(self, tokens: Tokens) -> PerToken:
        log_ratio = self.log_ratio(tokens).detach()
        low, high = _log_range(self.config.clip_low, self.config.clip_high)
        loss = -log_ratio.clamp(low, high).exp() * tokens["advantages"] * tokens["logprobs"]
        return loss, {"ratio/clipped": _share(log_ratio, low, high)}


class DPPOLoss(PolicyLoss):
    """-r A for tokens whose probability p is close to p_old, and 0 for other tokens: DPPO with
    Binary-TV, arXiv:2602.04879.

    A token has loss 0 if both conditions hold:

    - abs(p - p_old) is above the threshold. It is the total variation distance of the two policies,
      reduced to two outcomes: this token or any other.
    - The advantage would move p further from p_old.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(PolicyLoss.Config):
        threshold: Annotated[float, SHARE] = 0.15
        """Maximum change of a token's probability."""

    config: Config

    @multiple_of("advantages")
    def surrogate(self, tokens: Tokens) -> PerToken:
        advantages = tokens["advantages"]
        log_ratio = self.log_ratio(tokens)
        logprobs = tokens["logprobs"].detach()
        moved = logprobs.exp() - (logprobs - log_ratio.detach()).exp()
        outside = (moved.abs() > self.config.threshold) & (moved * advantages > 0)
        loss = -log_ratio.masked_fill(outside, -math.inf).exp() * advantages
        return loss, {"ratio/clipped": Metric(outside.float(), "mean")}


class ImportanceSamplingLoss(PolicyLoss):
    """-r A without a clip: the policy gradient of REINFORCE, corrected for the sampling policy."""

    @dataclass(kw_only=True, slots=True)
    class Config(PolicyLoss.Config):
        pass

    @multiple_of("advantages")
    def surrogate(self, tokens: Tokens) -> PerToken:
        return -self.log_ratio(tokens).exp() * tokens["advantages"], {}


class CrossEntropyLoss(PolicyLoss):
    """-log p of each token: supervised fine-tuning."""

    @dataclass(kw_only=True, slots=True)
    class Config(PolicyLoss.Config):
        reduction: Reduction = "token_mean"
        """Reduction of the tokens' losses, as in PolicyLoss."""

    def surrogate(self, tokens: Tokens) -> PerToken:
        return -tokens["logprobs"], {}


class DistillationLoss(PolicyLoss):
    """Loss with the gradient of KL(student || teacher) on the student's own tokens.

    It is the policy gradient with advantages log q - log p for the teacher's q: on-policy
    distillation, arXiv:2306.13649, with the reverse KL;
    thinkingmachines.ai/blog/on-policy-distillation.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(PolicyLoss.Config):
        reduction: Reduction = "token_mean"
        """Reduction of the tokens' losses, as in PolicyLoss."""

        teacher: Literal["roles", "reference"] = "roles"
        """Teacher: models in ``roles`` with the column ``teacher_logprobs``, or the reference."""

        @property
        def needs_reference(self) -> bool:
            return self.kl_coef > 0 or self.teacher == "reference"

    config: Config

    def surrogate(self, tokens: Tokens) -> PerToken:
        teacher = "reference" if self.config.teacher == "reference" else "teacher"
        gap = kl(tokens["logprobs"].detach(), tokens[f"{teacher}_logprobs"], "k1")
        return self.log_ratio(tokens).exp() * gap, {"kl/teacher": Metric(gap, "mean")}


class ValueLoss(Configurable):
    """0.5 max((v - R)^2, (v_old + clip(v - v_old) - R)^2), for a critic's values v and returns R.

    This is the loss of OpenAI's PPO implementation (arXiv:2005.12729, section 3). Columns:
    ``returns`` and, to clip, ``old_values``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        clip: Annotated[float, at_least(0, 1e6)] = 0.2
        """Distance from the old value up to which a value is trained towards its return; 0 for no
        limit."""

    def __init__(self, config: Config):
        self.config = config

    def __call__(self, tokens: Tokens) -> PerToken:
        """Return the loss of each token and its metrics."""
        values = tokens["values"]
        error = values - tokens["returns"]
        clip = self.config.clip
        metrics = {"value/mean": Metric(values, "mean"), "value/error": Metric(error.abs(), "mean")}
        loss = error.square()
        if clip:
            moved = values - tokens["old_values"]
            clipped = tokens["old_values"] + moved.clamp(-clip, clip)
            loss = torch.maximum(loss, (clipped - tokens["returns"]).square())
            metrics["value/clipped"] = Metric((moved.abs() > clip).float(), "mean")
        return loss / 2, metrics


def grpo(**fields: float) -> ClippedLoss.Config:
    """Return GRPO's loss; ``fields`` are fields of ClippedLoss.Config."""
    return ClippedLoss.Config(**fields)  # type: ignore[arg-type]


def dapo(**fields: float) -> ClippedLoss.Config:
    """Return DAPO's loss, with clip-higher and the mean over tokens; ``fields`` are fields of
    ClippedLoss.Config.
    """
    defaults: dict[str, Any] = {"clip_high": 0.28, "reduction": "token_mean"}
    return grpo(**(defaults | fields))


def _log_range(low: float, high: float) -> tuple[float, float]:
    """Return the logs of 1 - low and 1 + high."""
    return (math.log(1 - low) if low < 1 else -math.inf), math.log(1 + high)


def _share(log_ratio: torch.Tensor, low: float, high: float) -> Metric:
    """Return the share of ratios out of range."""
    return Metric(((log_ratio < low) | (log_ratio > high)).float(), "mean")
