"""Per-token metrics over micro-batches, then over data-parallel ranks."""

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist

from rl.algorithms.losses import Metric
from rl.metrics import Metrics, Value


class MetricTotals:
    """Sums and extremes, kept on the device until ``reduce``. Each metric declares its
    reduction.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None):
        self._device = device
        self._group = group
        self._sums: dict[str, torch.Tensor] = {}
        self._extremes: dict[str, torch.Tensor] = {}
        self._signs: dict[str, float] = {}

    def add(self, loss: torch.Tensor, metrics: Mapping[str, Metric], weights: torch.Tensor) -> None:
        """Add the loss of each token times its weight, and the other metrics of the tokens with
        weight > 0.
        """
        self._add_sum("loss/mean", loss, weights)
        mask = weights > 0
        for name, (values, reduction, where) in metrics.items():
            chosen = mask if where is None else mask & where
            if reduction == "mean":
                self._add_sum(name, values, chosen)
                continue
            self._signs[name] = 1.0 if reduction == "max" else -1.0
            signed = torch.where(chosen, self._signs[name] * values.detach(), -torch.inf)
            best = torch.cat([signed, signed.new_full((1,), -torch.inf)]).max()
            self._extremes[name] = torch.maximum(best, self._extremes.get(name, best))

    def _add_sum(self, name: str, values: torch.Tensor, weights: torch.Tensor) -> None:
        weighted = torch.where(weights > 0, values.detach() * weights, 0.0)
        pair = torch.stack([weighted.sum(dtype=torch.float64), weights.sum(dtype=torch.float64)])
        self._sums[name] = self._sums.get(name, 0.0) + pair

    def reduce(self) -> Metrics:
        """Return the metrics over all ranks, the same on every rank. Omits extremes without a
        token.
        """
        sums = torch.stack([*self._sums.values()])
        extremes = torch.stack([torch.zeros((), device=self._device), *self._extremes.values()])
        if self._group is not None:
            dist.all_reduce(sums, dist.ReduceOp.SUM, self._group)
            dist.all_reduce(extremes, dist.ReduceOp.MAX, self._group)
        reduced = {
            name: Value(total / weight if weight > 0 else 0.0, "mean", weight)
            for name, (total, weight) in zip(self._sums, sums.tolist(), strict=True)
        }
        for name, value in zip(self._extremes, extremes[1:].tolist(), strict=True):
            if value != -math.inf:
                sign = self._signs[name]
                reduced[name] = Value(sign * value, "max" if sign > 0 else "min")
        return Metrics(reduced)
