"""Per-token metrics over micro-batches, then over data-parallel ranks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
import torch.distributed as dist
from torchtitan.models.utils import get_moe_model_nparams_and_flops
from torchtitan.protocols import BaseModel
from torchtitan.tools.utils import get_local_device

from rl.algorithms.loss_results import LOSS, Metric, mean_of, totals_of, value_of_totals
from rl.metrics import Metrics, Reduction
from rl.model.delta_net import DeltaLayer
from rl.types import Batch


@dataclass
class WorkCount:
    """Floating-point operations of forward and backward passes, by torchtitan's formula.
    Recomputation is not counted. Attention is counted for all pairs of tokens, as if no mask
    existed. A prompt that sequences share is counted for each.
    """

    per_token: int
    per_pair: int
    """Operations for each ordered pair of tokens of a sequence."""
    count: int = 0

    @classmethod
    def of(cls, model: BaseModel) -> Self:
        """Return a count of 0 operations for ``model``."""
        config = model.config
        attention = config.first_attention
        sizes = (attention.n_heads, 2 * attention.head_dim)
        alone, with_one = (
            get_moe_model_nparams_and_flops(config, model, *sizes, length)[1] for length in (0, 1)
        )
        nets = [layer.delta_net for layer in config.layers if isinstance(layer, DeltaLayer.Config)]
        rule = 3 * sum(net.a.out_features * net.heads.flop for net in nets)
        return cls(alone + rule, with_one - alone)

    def add(self, lengths: torch.Tensor, passes: int = 3) -> None:
        """Add sequences of ``lengths``, int64 [N]. A backward pass counts as two ``passes``."""
        pairs = int(lengths.square().sum())
        count = self.per_token * int(lengths.sum()) + self.per_pair * pairs
        self.count += count * passes // 3

    def take(self) -> int:
        """Return the count, and count from 0 again."""
        count = self.count
        self.count = 0
        return count


@dataclass
class StepSums:
    """Sums over the calls of ``forward_backward`` since the last optimizer step."""

    weight: float = 0.0
    """Weight of this rank's part of the batches."""
    metrics: list[Metrics] = field(default_factory=list)
    """Metrics of each call."""
    routed: torch.Tensor | None = None
    """Sums of the routers' choices, float64 [layers, E + 6]: see :class:`Routing`."""


def over_ranks(group: dist.ProcessGroup | None, value: float, reduction: Any) -> float:
    """Return the sum, maximum or minimum of the ``value`` of each rank of ``group``."""
    if group is None:
        return value
    total = torch.tensor(value, dtype=torch.float64, device=get_local_device())
    dist.all_reduce(total, reduction, group)
    return float(total)


class MetricTotals:
    """Totals of metrics in float64, kept on the device until ``reduce``. Each metric declares its
    reduction.
    """

    def __init__(self, group: dist.ProcessGroup | None):
        self._group = group
        self._rules: dict[str, Reduction] = {}
        self._totals: dict[str, torch.Tensor] = {}
        """Result of :func:`totals_of` by name."""

    def add(self, loss: torch.Tensor, metrics: Mapping[str, Metric], weights: torch.Tensor) -> None:
        """Add the loss of each token times its weight, unless the metrics have a mean of their own,
        and the metrics of the tokens with weight > 0.
        """
        if LOSS not in metrics:
            self._add(LOSS, loss, "mean", weights)
        mask = weights > 0
        for name, (values, rule, factors) in metrics.items():
            self._add(
                name, values, rule, mask.double() if factors is None else mask * factors.double()
            )

    def add_share(self, batch: Batch, learns: torch.Tensor, *, skips: bool) -> None:
        """Add the share of tokens of sequences without a gradient; if the batch ``skips`` these
        sequences, add their loss, which is 0.
        """
        weights = batch.loss_weights.to(get_local_device())
        idle = (~learns).repeat_interleave(batch.lengths).to(weights)
        self._add("trainer/zero_gradient", idle, "mean", (weights > 0).double())
        if skips:
            self._add(LOSS, torch.zeros_like(idle), "mean", weights * idle)

    def _add(self, name: str, values: torch.Tensor, rule: Reduction, weights: torch.Tensor) -> None:
        self._rules[name] = rule
        totals = totals_of(values.detach(), rule, weights.double())
        before = self._totals.get(name)
        self._totals[name] = totals if before is None else _merged(torch.stack([before, totals]))

    def reduce(self) -> Metrics:
        """Return the metrics over all ranks, the same on every rank. Omits extremes without a
        token.
        """
        rows = torch.stack([*self._totals.values()])
        if self._group is not None:
            gathered = rows.new_empty(self._group.size() * len(rows), 4)
            dist.all_gather_single(gathered, rows, self._group)
            rows = _merged(gathered.view(-1, *rows.shape))
        reduced = {
            name: value_of_totals(rule, *row)
            for (name, rule), row in zip(self._rules.items(), rows.tolist(), strict=True)
            if rule not in ("max", "min") or row[-1] != -math.inf
        }
        return Metrics(reduced)


def _merged(totals: torch.Tensor) -> torch.Tensor:
    """Merge totals [N, ..., 4]. Squares about the common mean: Chan, Golub and LeVeque, 1979, eq.
    2.1.
    """
    total, weight, squares, extreme = totals.unbind(-1)
    sums = torch.stack([total.sum(0), weight.sum(0)])
    moved = squares + weight * (mean_of(total, weight) - mean_of(*sums)).square()
    return torch.stack([*sums, moved.sum(0), extreme.amax(0)], dim=-1)
