"""Losses over whole sequences: preference training and reward models.

Such a loss is a function of one score per sequence and compares sequences of different
micro-batches and ranks. :mod:`rl.algorithms.sequence_scores` computes its gradient, which does not
depend on how the batch is split.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.config import Configurable

from rl.algorithms.loss_results import Metric
from rl.errors import RunError
from rl.types import Head
from rl.types.rules import above, at_least

SCALE = above(0, 1e6)
WEIGHT = at_least(0, 1e6)

Costs = tuple[Tensor, Mapping[str, Tensor | Metric]]
"""Cost of each example, [P], and metrics: values [M], of which the mean is reported, or a Metric of
values [M]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """Indices, int64, into a loss's scores [n], of the sequences that the loss compares.

    A loss of pairs compares ``chosen[i]`` with ``rejected[i]``; a sequence may be in several pairs.
    """

    chosen: Tensor
    """Chosen sequences of pairs, or desirable sequences of an unpaired loss, [P]."""
    rejected: Tensor
    """Rejected sequences of pairs, [P], or undesirable sequences of an unpaired loss, [Q]."""
    mismatched: Tensor | None = None
    """Sequences of one example's prompt and another example's completion, [M], to estimate a
    baseline from."""
    margins: Tensor | None = None
    """Target difference between the rewards of each pair, float [P], for a reward model."""

    @classmethod
    def pairs(
        cls, count: int, margins: Tensor | None = None, device: torch.device | None = None
    ) -> "Labels":
        """Return the labels of ``count`` pairs: rows 0, 2, 4... are chosen over 1, 3, 5..."""
        rows = torch.arange(2 * count, device=device)
        return cls(chosen=rows[::2], rejected=rows[1::2], margins=margins)

    @classmethod
    def unpaired(cls, desirable: Tensor) -> "Labels":
        """Return the labels of n rows; ``desirable``, bool [n], marks the desirable rows.

        Rows n to 2n - 1 are mismatched, as
        :func:`rl.algorithms.sequence_scores.with_mismatched` appends them.
        """
        count = len(desirable)
        return cls(
            chosen=desirable.nonzero().squeeze(1),
            rejected=(~desirable).nonzero().squeeze(1),
            mismatched=torch.arange(count, 2 * count),
        )


class SequenceLoss(Configurable):
    """Base of all losses over whole sequences.

    To write your own, subclass this, with a Config of its own, and define ``__call__``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        length_normalized: bool = False
        """Whether a score is the mean, not the sum, of the log-probs of a sequence's trained
        tokens. A reward model's score is one value either way."""

    config: Config
    head: Head = "logprobs"
    """Output of the model that scores are computed from."""
    needs_reference = False
    """Whether the loss compares scores with those of a reference policy."""
    is_unpaired = False
    """Whether examples are single answers with a label."""

    def __init__(self, config: Config):
        self.config = config

    def __call__(self, scores: Tensor, reference: Tensor | None, labels: Labels) -> Costs:
        """Return the cost of each example and metrics.

        ``scores`` and ``reference`` are [n]; gradients flow into ``scores``. The loss of a step is
        the mean of the costs of all its examples.
        """
        raise NotImplementedError

    def count(self, labels: Labels) -> int:
        """Return the number of examples, P."""
        return len(labels.chosen)


class PairLoss(SequenceLoss):
    """Base of losses that compare a chosen sequence with a rejected one.

    A subclass defines the reward of a sequence and the cost of a pair's rewards. The cost of a pair
    depends on no other pair: the pairs of a step may be in several calls.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(SequenceLoss.Config):
        pass

    def __call__(self, scores: Tensor, reference: Tensor | None, labels: Labels) -> Costs:
        """Return the cost of each pair, [P], and metrics.

        Raises RunError if the numbers of chosen and rejected sequences differ.
        """
        if len(labels.chosen) != len(labels.rejected):
            raise RunError(
                f"{type(self).__name__} compares pairs; the labels have {len(labels.chosen)} "
                f"chosen and {len(labels.rejected)} rejected sequences"
            )
        rewards = self.rewards(scores, reference)
        chosen = rewards[labels.chosen]
        rejected = rewards[labels.rejected]
        margins = chosen - rejected
        metrics = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margin": margins,
            "rewards/accuracy": (margins > 0).double(),
        }
        return self.cost(chosen, rejected, labels), metrics

    def rewards(self, scores: Tensor, reference: Tensor | None) -> Tensor:
        """Return the implicit reward of each sequence, [n]."""
        raise NotImplementedError

    def cost(self, chosen: Tensor, rejected: Tensor, labels: Labels) -> Tensor:
        """Return the cost of each pair, [P], from the rewards of its sequences, [P] each."""
        raise NotImplementedError


class DPOLoss(PairLoss):
    """-log sigmoid(h), h = beta (log p/p_ref of chosen - log p/p_ref of rejected): DPO,
    arXiv:2305.18290, eq. 7.

    With ``label_smoothing`` s, -(1 - s) log sigmoid(h) - s log sigmoid(-h): conservative DPO,
    ericmitchell.ai/cdpo.pdf.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(PairLoss.Config):
        beta: Annotated[float, SCALE] = 0.1
        """Reward per unit of log-ratio: strength of the pull to the reference policy."""

        label_smoothing: Annotated[float, at_least(0, 0.5)] = 0.0
        """Assumed probability that a pair's labels are swapped."""

    config: Config
    needs_reference = True

    def rewards(self, scores: Tensor, reference: Tensor | None) -> Tensor:
        return self.config.beta * log_ratio(scores, reference)

    def cost(self, chosen: Tensor, rejected: Tensor, labels: Labels) -> Tensor:
        h = chosen - rejected
        swapped = self.config.label_smoothing
        return -(1 - swapped) * F.logsigmoid(h) - swapped * F.logsigmoid(-h)


class IPOLoss(PairLoss):
    """(h - 1 / (2 tau))^2, h = log p/p_ref of chosen - log p/p_ref of rejected: IPO,
    arXiv:2310.12036, eq. 17.

    Log-ratios are means over tokens by default, as in TRL, on the advice of the authors.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(PairLoss.Config):
        tau: Annotated[float, SCALE] = 0.1
        """Strength of the pull to the reference policy; log-ratios differ by 1 / (2 tau) at the
        optimum. TRL calls it beta."""

        length_normalized: bool = True
        """Whether a score is the mean, not the sum, of the log-probs of a sequence's trained
        tokens."""

    config: Config
    needs_reference = True

    def rewards(self, scores: Tensor, reference: Tensor | None) -> Tensor:
        return self.config.tau * log_ratio(scores, reference)

    def cost(self, chosen: Tensor, rejected: Tensor, labels: Labels) -> Tensor:
        return (((chosen - rejected) - 0.5) / self.config.tau).square()


class SimPOLoss(PairLoss):
    """-log sigmoid(r_w - r_l - gamma), r = beta / length * log p: SimPO, arXiv:2405.14734, eq. 6.

    It needs no reference policy.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(PairLoss.Config):
        beta: Annotated[float, SCALE] = 2.0
        """Reward per unit of mean log-prob."""

        gamma: Annotated[float, WEIGHT] = 1.0
        """Target margin of the rewards of a pair."""

        length_normalized: bool = True
        """Whether a score is the mean, not the sum, of the log-probs of a sequence's trained
        tokens."""

    config: Config

    def rewards(self, scores: Tensor, reference: Tensor | None) -> Tensor:
        return self.config.beta * scores

    def cost(self, chosen: Tensor, rejected: Tensor, labels: Labels) -> Tensor:
        return -F.logsigmoid(chosen - rejected - self.config.gamma)


class BradleyTerryLoss(PairLoss):
    """-log sigmoid(r_w - r_l - m) + c (r_w + r_l)^2 for rewards r: a reward model's loss,
    arXiv:2203.02155, eq. 1.

    The margin m is that of arXiv:2307.09288, eq. 2: ``margins`` of the labels, or else of the
    config. The coefficient c centres rewards at 0: arXiv:2312.09244, eq. 2.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(PairLoss.Config):
        margin: Annotated[float, WEIGHT] = 0.0
        """Margin of the rewards of a pair if its labels have no margin."""

        centering_coef: Annotated[float, WEIGHT] = 0.0
        """Coefficient of the square of the sum of a pair's rewards."""

    config: Config
    head: Head = "values"

    def rewards(self, scores: Tensor, reference: Tensor | None) -> Tensor:
        return scores

    def cost(self, chosen: Tensor, rejected: Tensor, labels: Labels) -> Tensor:
        margins = self.config.margin if labels.margins is None else labels.margins.to(chosen)
        centering = self.config.centering_coef * (chosen + rejected).square()
        return centering - F.logsigmoid(chosen - rejected - margins)


class KTOLoss(SequenceLoss):
    """w_d sigmoid(beta (z - h)) for desirable sequences, w_u sigmoid(beta (h - z)) for undesirable
    sequences, h = log p/p_ref: KTO, arXiv:2402.01306, section 4.1.

    The loss is the mean over all examples of both kinds. The baseline z estimates KL(p || p_ref):
    it is max(0, mean of h over all mismatched sequences of the call), and no gradient flows through
    it. In mismatched sequence i, completion i + 1 follows prompt i, cyclically, as in the paper,
    which shifts within a micro-batch. TRL shifts the other way: completion i - 1 follows prompt i.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(SequenceLoss.Config):
        beta: Annotated[float, SCALE] = 0.1
        """Reward per unit of log-ratio: strength of the pull to the reference policy."""

        desirable_weight: Annotated[float, WEIGHT] = 1.0
        """Weight of desirable sequences."""

        undesirable_weight: Annotated[float, WEIGHT] = 1.0
        """Weight of undesirable sequences."""

    config: Config
    needs_reference = True
    is_unpaired = True

    def count(self, labels: Labels) -> int:
        """Return the number of desirable and undesirable sequences."""
        return len(labels.chosen) + len(labels.rejected)

    def __call__(self, scores: Tensor, reference: Tensor | None, labels: Labels) -> Costs:
        """Return the cost of each sequence, desirable ones first, [P + Q], and metrics.

        Raises RunError without mismatched sequences.
        """
        config = self.config
        if labels.mismatched is None or not len(labels.mismatched):
            raise RunError("KTOLoss needs mismatched sequences to estimate its baseline from")
        rewards = config.beta * log_ratio(scores, reference)
        baseline = rewards[labels.mismatched].mean().clamp(min=0).detach()
        chosen = rewards[labels.chosen]
        rejected = rewards[labels.rejected]
        above_baseline = torch.cat([chosen - baseline, baseline - rejected])
        metrics = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/accuracy": (above_baseline > 0).double(),
            "kl/baseline": baseline[None] / config.beta,
        }
        if len(chosen) and len(rejected):
            metrics["rewards/margin"] = (chosen.mean() - rejected.mean())[None]
        weights = torch.cat(
            [
                torch.full_like(chosen, config.desirable_weight),
                torch.full_like(rejected, config.undesirable_weight),
            ]
        )
        return weights * torch.sigmoid(-above_baseline), metrics


def log_ratio(scores: Tensor, reference: Tensor | None) -> Tensor:
    """Return the log of policy over reference policy for each sequence, [n].

    Raises RunError without a reference.
    """
    if reference is None:
        raise RunError(
            "the loss compares the policy with a reference policy and has no scores of it"
        )
    return scores - reference
