"""Rules that config fields carry as ``Annotated`` metadata."""

import dataclasses
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

Rule = TypeVar("Rule")

LEAST_EPS = 1e-30  # of Adam and AdamW
MAX_NODES = 10_000
YEAR_S = 366 * 24 * 3600


class Effect(StrEnum):
    """Kind of effect that a change of a field has on a run.

    A section's effect is that of the fields inside it that declare none.
    """

    NUMERICS = "numerics"
    """Changes what is computed."""
    PERFORMANCE = "performance"
    """Changes only where and how fast: samples and gradients are the same up to rounding."""
    COSMETIC = "cosmetic"
    """Changes neither of the above."""


NUMERICS = Effect.NUMERICS
PERFORMANCE = Effect.PERFORMANCE
COSMETIC = Effect.COSMETIC


@dataclass(frozen=True, slots=True)
class Bounds:
    """Range of a numeric field: ``least`` to ``most``, both included unless ``above`` or ``below``
    is set.
    """

    least: float
    most: float
    above: bool = False
    below: bool = False
    also: tuple[float, ...] = ()
    """Values outside the range that are allowed too, such as -1 for "the newest"."""

    def complaint(self, value: float) -> str:
        """Return the violated condition; empty if ``value`` is allowed. NaN violates the lower
        bound.
        """
        reaches = value > self.least if self.above else value >= self.least
        stays_within = value < self.most if self.below else value <= self.most
        if value in self.also or (reaches and stays_within):
            return ""
        others = "".join(f"{other:,}, or " for other in self.also)
        if not reaches:
            return f"{others}{'above' if self.above else 'at least'} {self.least:,}"
        return f"{others}{'below' if self.below else 'at most'} {self.most:,}"


@dataclass(frozen=True, slots=True)
class Fixed:
    """Rule of a field that changes nothing, so that it has to keep its default."""

    default: Any = field(hash=False)
    fix: str
    """Reason, and what to set instead."""


@dataclass(frozen=True, slots=True)
class NeedsCuda:
    """Rule of a field with values that a run on CPU cannot have."""

    values: tuple[Any, ...]
    otherwise: str
    """Allowed values on CPU."""


def at_least(least: float, most: float = 10**9, *, also: tuple[float, ...] = ()) -> Bounds:
    """Return a range that includes both ends."""
    return Bounds(least, most, also=also)


def above(least: float, most: float = 10**9, *, also: tuple[float, ...] = ()) -> Bounds:
    """Return a range that excludes its lower end."""
    return Bounds(least, most, above=True, also=also)


def between(least: float, most: float) -> Bounds:
    """Return a range that excludes both ends."""
    return Bounds(least, most, above=True, below=True)


SHARE = at_least(0, 1)
SIGNED = at_least(-1e6, 1e6)
SECONDS = above(0, YEAR_S)


def rule_of(hint: Any, kind: type[Rule]) -> Rule | None:
    """Return the rule of the given kind among the metadata of a field's type."""
    parts = get_args(hint) if get_origin(hint) in (Annotated, Union, UnionType) else ()
    for part in parts:
        rule = part if isinstance(part, kind) else rule_of(part, kind)
        if rule:
            return rule
    return None


@cache
def defaults_of(kind: type) -> dict[str, Any]:
    """Return the defaults of a dataclass's fields that have one, by name. They must not be
    changed.
    """
    defaults = {}
    for member in dataclasses.fields(kind):
        if member.default is not dataclasses.MISSING:
            defaults[member.name] = member.default
        elif member.default_factory is not dataclasses.MISSING:
            defaults[member.name] = member.default_factory()
    return defaults


def range_text(bounds: Bounds) -> str:
    """Return a range in words."""
    low = f"above {_number(bounds.least)}" if bounds.above else f"from {_number(bounds.least)}"
    high = f"and below {_number(bounds.most)}" if bounds.below else f"to {_number(bounds.most)}"
    return " ".join([low, high, *(f"or {_number(other)}" for other in bounds.also)])


def _number(value: float) -> str:
    whole = value == int(value) and (isinstance(value, int) or abs(value) < 1e12)
    return f"{int(value):,}" if whole else f"{value:g}"
