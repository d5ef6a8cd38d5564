"""Metrics that merge exactly: each value carries the rule by which later values join it."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

Rule = Literal["mean", "max", "min", "sum", "last"]


class Value(NamedTuple):
    """A reduced value. A mean counts as ``weight`` when it is merged with others."""

    value: float
    rule: Rule = "mean"
    weight: float = 1.0


class Metrics(Mapping[str, float]):
    """A mapping of names to floats, and how each float merges with those of other updates. ::

    first = Metrics({"loss/mean": Value(1.0, "mean", weight=30), "ratio/max": Value(2.0, "max")})
    whole = Metrics.merged([first, second])
    """

    def __init__(self, entries: Mapping[str, Value]):
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> float:
        return self._entries[name].value

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __or__(self, other: "Metrics") -> "Metrics":
        """Return the metrics of both; those of ``other`` win."""
        return Metrics(self._entries | other._entries)

    def renamed(self, rename: Callable[[str], str]) -> "Metrics":
        """Return the same values under other names."""
        return Metrics({rename(name): entry for name, entry in self._entries.items()})

    @classmethod
    def merged(cls, parts: Iterable["Metrics"]) -> "Metrics":
        """Return the metrics over all ``parts``, in the order of time."""
        entries: dict[str, Value] = {}
        for part in parts:
            for name, entry in part._entries.items():
                entries[name] = _merge(entries[name], entry) if name in entries else entry
        return cls(entries)


def _merge(before: Value, after: Value) -> Value:
    weight = before.weight + after.weight
    if math.isnan(before.value) and before.weight:
        return before
    match after.rule:
        case "last":
            return after
        case "max":
            value = max(after.value, before.value)  # NaN stays if it comes first
        case "min":
            value = min(after.value, before.value)
        case "sum":
            value = before.value + after.value
        case "mean":
            parts = [part for part in (before, after) if part.weight]
            value = (
                sum(part.value * part.weight for part in parts) / weight if parts else after.value
            )
    return Value(value, after.rule, weight)
