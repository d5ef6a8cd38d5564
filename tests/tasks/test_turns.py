"""Turns are in proportion in every beginning, and any place is known without those before it."""

import itertools
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.tasks.turns import Turns

WEIGHT = st.one_of(st.integers(1, 20).map(float), st.floats(1e-6, 1e6))
WEIGHTS = st.lists(WEIGHT, min_size=1, max_size=12).map(
    lambda weights: {f"t{i}": w for i, w in enumerate(weights)}
)
BOUND = 1.68


def off(weights: dict[str, float], counts: dict[str, int], turns: int) -> float:
    total = sum(map(Fraction, weights.values()))
    return max(
        abs(counts.get(name, 0) - turns * Fraction(weight) / total)
        for name, weight in weights.items()
    )


@settings(max_examples=60, deadline=None)
@given(WEIGHTS)
def test_in_every_beginning_each_has_its_share(weights):
    turns = Turns(weights)
    counts = Counter()
    for place in range(150):
        name, before = turns.turn(place)
        assert before == counts[name]
        counts[name] += 1
        assert off(weights, counts, place + 1) < BOUND


@settings(max_examples=100, deadline=None)
@given(WEIGHTS, st.integers(0, 10**15))
def test_far_places_are_as_even_and_agree_with_their_counts(weights, place):
    turns = Turns(weights)
    before = Counter(turns.counts(place))
    after = Counter(turns.counts(place + 1))
    assert before.total() == place
    assert off(weights, before, place) < BOUND
    name, shown = turns.turn(place)
    assert shown == before[name]
    before[name] += 1
    assert before == after


@pytest.mark.parametrize("base", [1.0, 1.6180339887, 10.0])
def test_many_weights_alike_or_far_apart_are_as_even(base):
    weights = {f"t{i}": base**i for i in range(40)}
    turns = Turns(weights)
    assert max(off(weights, turns.counts(place), place) for place in range(0, 10**6, 1009)) < BOUND


def test_whole_weights_come_round_exactly():
    turns = Turns({"a": 5, "b": 3, "c": 2})
    names = [turns.turn(place)[0] for place in range(40)]
    assert names == names[:10] * 4
    assert Counter(names[:10]) == {"a": 5, "b": 3, "c": 2}
    assert all(len(list(run)) <= 2 for _, run in itertools.groupby(names))


def test_a_weight_of_zero_has_no_turn():
    turns = Turns({"a": 0.0, "b": 1.0, "c": 0.0})
    assert [turns.turn(place) for place in range(3)] == [("b", 0), ("b", 1), ("b", 2)]
    assert turns.counts(3) == {"b": 3}
