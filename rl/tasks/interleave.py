"""Names interleaved by stride scheduling, with random access to any place."""

from collections.abc import Mapping
from fractions import Fraction
from math import floor

HALF = Fraction(1, 2)


class StrideSchedule:
    """An endless sequence of names, each as often as its weight says.

    The k-th showing of a name with share s, from k = 0, is due at time (k + 1/2) / s, and showings
    come in the order of their times; of equal times, that of the name given first. At any time t a
    name was shown s · t times, give or take 1/2. With n names, place p thus comes at a time within
    n/2 of p, and among the first p places a name comes p · s times, give or take
    1/2 + s · (n - 2)/2.
    """

    def __init__(self, weights: Mapping[str, float]):
        """Weights are finite, not negative, and not all 0."""
        total = sum(map(Fraction, weights.values()))
        self.shares = {name: Fraction(weight) / total for name, weight in weights.items() if weight}
        """Share of each name of weight above 0."""

    def at(self, place: int) -> tuple[str, int]:
        """Return the name at ``place``, from 0, and how often it comes before."""
        counts = self.counts(place)
        name = self._next(counts)
        return name, counts[name]

    def counts(self, places: int) -> dict[str, int]:
        """Return how often each name of weight above 0 comes in the first ``places``."""
        # By this time at most ``places`` showings are due, and at most len(shares) fewer.
        time = max(places - HALF * len(self.shares), Fraction(0))
        counts = {name: floor(share * time + HALF) for name, share in self.shares.items()}
        for _ in range(places - sum(counts.values())):
            counts[self._next(counts)] += 1
        return counts

    def _next(self, counts: Mapping[str, int]) -> str:
        return min(self.shares, key=lambda name: (2 * counts[name] + 1) / self.shares[name])
