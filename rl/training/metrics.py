"""Per-token metrics over micro-batches, then over data-parallel ranks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torchtitan.protocols import BaseModel

from rl.algorithms.loss_results import Metric
from rl.metrics import Metrics, Rule, Value


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
        alone, with_one = (model.config.get_nparams_and_flops(model, n)[1] for n in (0, 1))
        return cls(alone, with_one - alone)

    def add(self, lengths: torch.Tensor) -> None:
        """Add sequences of ``lengths``, int64 [N]."""
        pairs = int(lengths.square().sum())
        self.count += self.per_token * int(lengths.sum()) + self.per_pair * pairs

    def take(self) -> int:
        """Return the count, and count from 0 again."""
        count = self.count
        self.count = 0
        return count


class MetricTotals:
    """Sums, moments and extremes in float64, kept on the device until ``reduce``. Each metric
    declares its reduction.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None):
        self._device = device
        self._group = group
        self._rules: dict[str, Rule] = {}
        self._sums: dict[str, torch.Tensor] = {}
        """Weighted sum and weight, [2]."""
        self._moments: dict[str, torch.Tensor] = {}
        """Weighted sum, weight, and weighted squares about their own mean, [3]."""
        self._extremes: dict[str, torch.Tensor] = {}
        """Maximum, or minus the minimum."""

    def add(self, loss: torch.Tensor, metrics: Mapping[str, Metric], weights: torch.Tensor) -> None:
        """Add the loss of each token times its weight, and the other metrics of the tokens with
        weight > 0.
        """
        self._rules["loss/mean"] = "mean"
        self._add_sum("loss/mean", loss, weights)
        mask = weights > 0
        for name, (values, reduction, own) in metrics.items():
            counted = mask.double() if own is None else mask * own.double()
            self._rules[name] = reduction
            match reduction:
                case "mean" | "sum":
                    self._add_sum(name, values, counted)
                case "std":
                    self._add_moments(name, values, counted)
                case "max" | "min":
                    self._add_extreme(name, values, counted, 1.0 if reduction == "max" else -1.0)

    def _add_sum(self, name: str, values: torch.Tensor, weights: torch.Tensor) -> None:
        pair = _weighted(values, weights)
        self._sums[name] = self._sums.get(name, 0.0) + pair

    def _add_moments(self, name: str, values: torch.Tensor, weights: torch.Tensor) -> None:
        pair = _weighted(values, weights)
        squares, _ = _weighted((values.detach() - _mean(pair)).double().square(), weights)
        after = torch.cat([pair, squares[None]])
        before = self._moments.get(name, torch.zeros_like(after))
        self._moments[name] = _about(before, (before + after)[:2]) + _about(
            after, (before + after)[:2]
        )

    def _add_extreme(
        self, name: str, values: torch.Tensor, weights: torch.Tensor, sign: float
    ) -> None:
        signed = torch.where(weights > 0, sign * values.detach(), -torch.inf)
        best = torch.cat([signed, signed.new_full((1,), -torch.inf)]).max()
        self._extremes[name] = torch.maximum(best, self._extremes.get(name, best))

    def reduce(self) -> Metrics:
        """Return the metrics over all ranks, the same on every rank. Omits extremes without a
        token.
        """
        sums = torch.stack([*self._sums.values()])
        extremes = torch.stack([torch.zeros((), device=self._device), *self._extremes.values()])
        if self._group is not None:
            dist.all_reduce(sums, dist.ReduceOp.SUM, self._group)
            dist.all_reduce(extremes, dist.ReduceOp.MAX, self._group)
        reduced = dict[str, Value]()
        for name, (total, weight) in zip(self._sums, sums.tolist(), strict=True):
            rule = self._rules[name]
            number = total if rule == "sum" else total / weight if weight > 0 else 0.0
            reduced[name] = Value(number, rule, weight)
        for name, value in zip(self._extremes, extremes[1:].tolist(), strict=True):
            if value != -math.inf:
                rule = self._rules[name]
                reduced[name] = Value(value if rule == "max" else -value, rule)
        return Metrics(reduced | self._deviations())

    def _deviations(self) -> dict[str, Value]:
        """Return the standard deviations over all ranks."""
        if not self._moments:
            return {}
        moments = torch.stack([*self._moments.values()])
        pairs = moments[:, :2].clone()
        if self._group is not None:
            dist.all_reduce(pairs, dist.ReduceOp.SUM, self._group)
        squares = torch.stack([_about(*rows)[2] for rows in zip(moments, pairs, strict=True)])
        if self._group is not None:
            dist.all_reduce(squares, dist.ReduceOp.SUM, self._group)
        rows = torch.cat([pairs, squares[:, None]], dim=1).tolist()
        return {
            name: Value(math.sqrt(square / weight), "std", weight, total / weight)
            if weight > 0
            else Value(0.0, "std", 0.0)
            for name, (total, weight, square) in zip(self._moments, rows, strict=True)
        }


def _weighted(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of the values with weight > 0, and their weight, float64 [2]."""
    weights = weights.double()
    weighted = torch.where(weights > 0, values.detach() * weights, 0.0)
    return torch.stack([weighted.sum(), weights.sum()])


def _mean(pair: torch.Tensor) -> torch.Tensor:
    """Return the mean of a weighted sum and a weight, [2]; 0 without a weight."""
    return torch.where(pair[1] > 0, pair[0] / pair[1], 0.0)


def _about(moments: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return ``moments`` [3] with the squares about the mean of ``whole`` [2]: Chan, Golub and
    LeVeque, 1979, eq. 2.1.
    """
    moved = moments.clone()
    moved[2] += moments[1] * (_mean(moments) - _mean(whole)).square()
    return moved
