"""Metrics that merge exactly: each value carries the rule by which it is merged with others."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, Self

Reduction = Literal["mean", "max", "min", "sum", "std"]
Rule = Reduction | Literal["last"]


class Value(NamedTuple):
    """A reduced value, which merges with others as if all numbers had been reduced at once."""

    value: float
    rule: Rule = "mean"
    weight: float = 1.0
    """Sum of the weights of the reduced numbers; counts for ``mean`` and ``std``."""
    mean: float = 0.0
    """Mean of the reduced numbers; only for ``std``."""

    @classmethod
    def of(cls, number: float, rule: Rule = "mean", weight: float = 1.0) -> Self:
        """Return the value of one number."""
        return cls(0.0, rule, weight, number) if rule == "std" else cls(number, rule, weight)

    @classmethod
    def over(cls, numbers: Sequence[float], rule: Rule = "mean") -> "Value":
        """Return the value of at least one number, each with weight 1."""
        return merged_values([cls.of(number, rule) for number in numbers])


Entry = float | Value
"""A value with its rule, or a number, which stands for ``Value.of(number)``."""


class Metrics(Mapping[str, float]):
    """A mapping of names to floats, and how each float merges with those of other updates. ::

    first = Metrics({"loss/mean": Value(1.0, "mean", weight=30), "ratio/max": Value(2.0, "max")})
    whole = Metrics.merged([first, second])
    """

    def __init__(self, entries: Mapping[str, Entry], *, weight: float = 1.0):
        """``weight`` is the weight of each entry that is a number."""
        self._entries = {
            name: entry if isinstance(entry, Value) else Value(entry, "mean", weight)
            for name, entry in entries.items()
        }

    def __getitem__(self, name: str) -> float:
        return self._entries[name].value

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"Metrics({dict(self)})"

    def __or__(self, other: "Metrics") -> "Metrics":
        """Return the metrics of both; those of ``other`` win."""
        return Metrics(self._entries | other._entries)

    def renamed(self, rename: Callable[[str], str]) -> "Metrics":
        """Return the same values under other names."""
        return Metrics({rename(name): entry for name, entry in self._entries.items()})

    @classmethod
    def merged(cls, parts: Iterable["Metrics"]) -> "Metrics":
        """Return the metrics over all ``parts``, which are in the order of time.

        Raises ValueError, which names the metric, if two parts have different rules for it.
        """
        entries: dict[str, list[Value]] = {}
        for part in parts:
            for name, entry in part._entries.items():
                entries.setdefault(name, []).append(entry)
        for name, values in entries.items():
            if len(rules := dict.fromkeys(value.rule for value in values)) > 1:
                raise ValueError(f"metric {name!r} is reduced by {' and by '.join(rules)}")
        return cls({name: merged_values(values) for name, values in entries.items()})


def merged_values(values: Sequence[Value]) -> Value:
    """Merge ``values``: at least one value, all with the same rule.

    NaN stays NaN. Standard deviations divide by the sum of weights. They merge by the sums of
    squares about the common mean: Chan, Golub and LeVeque, "Updating formulae and a pairwise
    algorithm for computing sample variances", 1979, eq. 2.1.
    """
    rule = values[0].rule
    weight = sum(value.weight for value in values)
    present = [value for value in values if value.weight]
    numbers = [value.value for value in values]
    match rule:
        case "last":
            return values[-1]
        case "sum":
            return Value(sum(numbers), rule, weight)
        case "max" | "min":
            chosen = (max if rule == "max" else min)(numbers)
            return Value(math.nan if any(map(math.isnan, numbers)) else chosen, rule, weight)
    if len(present) < 2:
        return present[0] if present else values[-1]
    mean = sum((value.mean if rule == "std" else value.value) * value.weight for value in present)
    mean /= weight
    if rule == "mean":
        return Value(mean, rule, weight)
    squares = sum(value.weight * (value.value**2 + (value.mean - mean) ** 2) for value in present)
    return Value(math.sqrt(squares / weight), rule, weight, mean)
