"""Stride scheduling of names, with random access to any place."""

from collections.abc import Mapping
from fractions import Fraction
from math import floor

HALF = Fraction(1, 2)


class StrideSchedule:
    """Endless sequence of names, each with a frequency proportional to its weight.

    Occurrence k = 0, 1, … of a name with share s is due at time (k + 1/2) / s. Occurrences are
    ordered by their times; at equal times the name given first precedes. Until time t a name occurs
    s · t ± 1/2 times. With n names, place p therefore has a time within n/2 of p, and a name occurs
    p · s ± (1/2 + s · (n - 2)/2) times among the first p places.
    """

    def __init__(self, weights: Mapping[str, float]):
        """``weights`` are finite, not negative, and not all 0."""
        total = sum(map(Fraction, weights.values()))
        self.shares = {name: Fraction(weight) / total for name, weight in weights.items() if weight}
        """Share of each name of weight above 0."""

    def at(self, place: int) -> tuple[str, int]:
        """Return the name at ``place``, from 0, and the number of its occurrences before."""
        counts = self.counts(place)
        name = self._next(counts)
        return name, counts[name]

    def counts(self, places: int) -> dict[str, int]:
        """Return the number of occurrences of each name in the first ``places``."""
        # At this time at least ``places`` - len(shares) and at most ``places`` occurrences are due.
        time = max(places - HALF * len(self.shares), Fraction(0))
        counts = {name: floor(share * time + HALF) for name, share in self.shares.items()}
        for _ in range(places - sum(counts.values())):
            counts[self._next(counts)] += 1
        return counts

    def _next(self, counts: Mapping[str, int]) -> str:
        return min(self.shares, key=lambda name: (2 * counts[name] + 1) / self.shares[name])
