"""Turns taken in proportion to weights, known for any place at once."""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from heapq import heapify, heappop, heappush
from math import floor


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two names, or pairs, that share the turns of both."""

    first: "_Pair | str"
    second: "_Pair | str"
    share: Fraction
    """Of the first."""

    def turns_of_first(self, turns: int) -> int:
        """How many of the pair's first ``turns``: its share, rounded."""
        return floor(self.share * turns + Fraction(1, 2))


class Turns:
    """An endless sequence of names: in every beginning of it each has its weight's share, give or
    take 1.68 turns.

    Names pair up as in a Huffman tree of their weights, and every pair cuts its turns in two by
    rounding. A share w of its parent's P is thus off by at most 1/2, and by w/P of what the parent
    is off: by 1/2 · (1 + w/P + w/G + …) in all, G the grandparent's and so on. Huffman pairs the
    lightest first, so an uncle weighs no less than w, and each ancestor no less than the two before
    it together. Hence the sum is below that of the reciprocals of Fibonacci's numbers, 3.36.
    """

    def __init__(self, weights: Mapping[str, float]):
        """Weights are finite, not negative, and not all 0."""
        total = sum(map(Fraction, weights.values()))
        self.shares = {name: Fraction(weight) / total for name, weight in weights.items() if weight}
        """By name, those of weight 0 left out."""
        nodes: list[tuple[Fraction, int, _Pair | str]] = [
            (share, place, name) for place, (name, share) in enumerate(self.shares.items())
        ]
        heapify(nodes)
        while len(nodes) > 1:
            (light, _, first) = heappop(nodes)
            (heavy, place, second) = heappop(nodes)
            heappush(nodes, (light + heavy, place, _Pair(first, second, light / (light + heavy))))
        self._root = nodes[0][2]

    def turn(self, place: int) -> tuple[str, int]:
        """Whose turn ``place``, from 0, is, and how many turns that name had before."""
        node = self._root
        while isinstance(node, _Pair):
            before = node.turns_of_first(place)
            if node.turns_of_first(place + 1) > before:
                node = node.first
                place = before
            else:
                node = node.second
                place = place - before
        return node, place

    def counts(self, turns: int) -> dict[str, int]:
        """How many of the first ``turns`` each name has, those of weight 0 left out."""
        counts: dict[str, int] = {}
        nodes = [(self._root, turns)]
        for node, own in nodes:
            if isinstance(node, _Pair):
                first = node.turns_of_first(own)
                nodes += [(node.first, first), (node.second, own - first)]
            else:
                counts[node] = own
        return counts
