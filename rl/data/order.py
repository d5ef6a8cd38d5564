"""The order of examples, a function of seed and epoch, so that a resumed run needs no saved state;
the shares of sets in it; and the choice of the examples that are held out.
"""

import math
import random
import threading
from array import array
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from hashlib import blake2b

from rl.errors import require, require_value

HALF = Fraction(1, 2)
PREPARED = 100_000
"""Size from which the order of an epoch is computed during the epoch before."""


def epoch_index(seed: int, number: int, size: int) -> int:
    """Return which of ``size`` examples is number ``number`` (from 0, without end) of the stream.

    Every epoch has each example once, in an order of its own. Ordering a million examples takes a
    second. A thread does it for the next epoch, so that no event loop waits. Raises ConfigError if
    ``size`` is 0.
    """
    problem = "1 leaves nothing to train on; the task is for evaluation alone"
    require(size > 0, problem, field="task.held_out_fraction", fix="lower it to train")
    epoch, place = divmod(number, size)
    if size >= PREPARED and place == size // 2:
        threading.Thread(target=epoch_order, args=(seed, epoch + 1, size), daemon=True).start()
    return epoch_order(seed, epoch, size)[place]


@lru_cache(maxsize=16)  # a mixture asks its tasks alternately
def epoch_order(seed: int, epoch: int, size: int) -> Sequence[int]:
    """Return the order of ``size`` examples in an epoch, from 0: the index of each."""
    order = array("I", range(size))
    # A string seed is hashed by its bytes, so the order is the same in every process.
    random.Random(f"epoch order/{seed}/{epoch}").shuffle(order)
    return order


def step_indices(seed: int, step: int, batch_size: int, size: int) -> list[int]:
    """Return which of ``size`` examples are in the batch of ``step``, from 0.

    Batches follow each other in the stream of :func:`epoch_index` without gaps. One batch may hold
    the end of an epoch and the start of the next.
    """
    return stream_indices(seed, step * batch_size, batch_size, size)


def stream_indices(seed: int, first: int, count: int, size: int) -> list[int]:
    """Return ``count`` indices of the stream of :func:`epoch_index`, from number ``first`` on."""
    return [epoch_index(seed, first + place, size) for place in range(count)]


def text_hash(text: str) -> bytes:
    """Return the hash of a text that :func:`choose_held_out` takes."""
    return blake2b(text.encode(), digest_size=8).digest()


def choose_held_out(
    hashes: Sequence[bytes], fraction: float, field: str, source: str
) -> list[bool]:
    """Return which texts, such as questions, are for evaluation: those with the lowest hashes, so
    that copies of a text stay together. None if ``fraction`` is 0, all if it is 1. ``field``
    names ``source``, for errors.
    """
    require_value(0 <= fraction <= 1, "task.held_out_fraction", fraction, "from 0 to 1")
    if fraction in (0, 1):
        return [fraction == 1] * len(hashes)
    different = sorted(set(hashes))
    require(
        len(different) >= 2,
        f"{source} has {len(different)} different question",
        field=field,
        fix="it must have 2 or more, one to train on and one held out",
    )
    count = min(math.ceil(len(different) * fraction), len(different) - 1)
    held_out = set(different[:count])
    return [digest in held_out for digest in hashes]


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
        counts = {name: math.floor(share * time + HALF) for name, share in self.shares.items()}
        for _ in range(places - sum(counts.values())):
            counts[self._next(counts)] += 1
        return counts

    def _next(self, counts: Mapping[str, int]) -> str:
        return min(self.shares, key=lambda name: (2 * counts[name] + 1) / self.shares[name])
