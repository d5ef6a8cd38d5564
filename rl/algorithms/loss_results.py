"""Results of a loss: the cost of each token, and metrics with their reductions."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, get_args, runtime_checkable

import torch

from rl.errors import RunError
from rl.metrics import Entry, Reduction, Value
from rl.types import Batch

LOSS = "loss/mean"
"""Metric that the engine computes from the costs of a loss without a metric of this name."""


class Metric(NamedTuple):
    """A value for each token, float [C], and its reduction over the tokens of loss weight > 0 on
    all ranks.
    """

    values: torch.Tensor
    reduction: Reduction
    weights: torch.Tensor | None = None
    """Weight of each token, at least 0, float or bool [C]; None for 1. A maximum or minimum is over
    the tokens of weight > 0."""


PerToken = tuple[torch.Tensor, dict[str, Metric]]
"""Cost of each token, [C], and metrics."""


@runtime_checkable
class KnowsZeros(Protocol):
    """Loss that knows tokens whose cost has no gradient, whatever the model computes."""

    def zero_gradient(self, columns: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Return whether each token of a batch with these columns [T] is one of them, bool [T];
        None for no token.
        """
        ...


def learning_sequences(batch: Batch, loss: object) -> torch.Tensor:
    """Return whether each sequence's loss may have a gradient, bool [N]: not without a token of
    weight above 0 that the loss counts.
    """
    counted = batch.loss_weights != 0
    zero = loss.zero_gradient(batch.columns) if isinstance(loss, KnowsZeros) else None
    if zero is not None:
        counted &= ~zero
    return torch.zeros(len(batch)).index_add(0, batch.owners, counted.float()) > 0


def check_loss_result(loss: object, result: Any, count: int) -> PerToken:
    """Return ``result`` of ``loss`` for ``count`` tokens.

    Raises RunError, naming the loss, unless ``result`` is a pair: costs, float32 [C] with a
    gradient, and a dict of :class:`Metric` with values [C].
    """
    if wrong := _loss_error(result, count):
        raise RunError(
            f"the loss {type(loss).__name__} returned {wrong}; it must return a pair for these "
            f"{count} tokens: float32 [{count}] with a gradient, and a dict of metrics"
        )
    return result


def _loss_error(result: Any, count: int) -> str:
    """Return the first error in a loss's ``result``; empty if it is a PerToken."""
    if not (isinstance(result, tuple) and len(result) == 2):
        return f"a {type(result).__name__}"
    costs, metrics = result
    if not isinstance(costs, torch.Tensor):
        return f"costs that are a {type(costs).__name__}"
    if costs.shape != (count,) or costs.dtype != torch.float32:
        return f"costs of shape {[*costs.shape]} and {costs.dtype}"
    if torch.is_grad_enabled() and not costs.requires_grad:
        return "costs without a gradient"
    if not isinstance(metrics, dict):
        return f"metrics that are a {type(metrics).__name__}"
    for name, metric in metrics.items():
        if not (isinstance(metric, Metric) and metric.reduction in get_args(Reduction)):
            wanted = f"not a Metric reduced by one of {get_args(Reduction)}"
            return f"a {type(metric).__name__} as metric {name!r}, {wanted}"
        if metric.values.shape != (count,):
            return f"{[*metric.values.shape]} values as metric {name!r}"
        if metric.weights is not None and metric.weights.shape != (count,):
            return f"{[*metric.weights.shape]} weights of metric {name!r}"
    return ""


def value_of(metric: Metric) -> Value:
    """Return the reduction of the metric's values with weight > 0, in float64. At least one value
    must have such a weight.
    """
    values = metric.values.detach().double()
    weights = torch.ones_like(values) if metric.weights is None else metric.weights.double()
    return value_of_totals(metric.reduction, *totals_of(values, metric.reduction, weights).tolist())


def totals_of(values: torch.Tensor, rule: Reduction, weights: torch.Tensor) -> torch.Tensor:
    """Return of the values with weight > 0 the weighted sum, the weight, the weighted squares about
    the mean (for ``std``, else 0), and the maximum or minus the minimum (else minus infinity),
    float64 [4].
    """
    counted = weights > 0
    total = torch.where(counted, values * weights, 0.0).sum()
    weight = weights.sum()
    squares = torch.zeros_like(weight)
    extreme = torch.full_like(weight, -torch.inf)
    if rule == "std":
        distances = (values - mean_of(total, weight)).double()
        squares = torch.where(counted, distances.square() * weights, 0.0).sum()
    if rule in ("max", "min"):
        signed = torch.where(counted, values if rule == "max" else -values, -torch.inf).double()
        extreme = torch.cat([signed, extreme[None]]).max()
    return torch.stack([total, weight, squares, extreme])


def mean_of(total: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the mean of a weighted sum and a weight; 0 without a weight."""
    return torch.where(weight > 0, total / weight, 0.0)


def value_of_totals(
    rule: Reduction, total: float, weight: float, squares: float, extreme: float
) -> Value:
    """Return the value of :func:`totals_of`."""
    mean = total / weight if weight > 0 else 0.0
    match rule:
        case "sum":
            return Value(total, rule, weight)
        case "mean":
            return Value(mean, rule, weight)
        case "std":
            return Value(math.sqrt(squares / weight) if weight > 0 else 0.0, rule, weight, mean)
    return Value(extreme if rule == "max" else -extreme, rule)


def moments(name: str, values: torch.Tensor) -> dict[str, Entry]:
    """Return the metrics ``NAME/mean``, ``NAME/std`` and ``NAME/max`` of values [C]; none if C is
    0.
    """
    rules: tuple[Reduction, ...] = ("mean", "std", "max") if len(values) else ()
    return {f"{name}/{rule}": value_of(Metric(values, rule)) for rule in rules}
