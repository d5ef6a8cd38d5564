"""Names are in proportion in every beginning, and any place is known without those before it."""

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.data.order import StrideSchedule

WEIGHT = st.one_of(st.integers(1, 20).map(float), st.floats(1e-6, 1e6))
WEIGHTS = st.lists(WEIGHT, min_size=1, max_size=12).map(
    lambda weights: {f"t{i}": w for i, w in enumerate(weights)}
)


def share_of(name: str, weights: dict[str, float]) -> Fraction:
    return Fraction(weights[name]) / sum(map(Fraction, weights.values()))


def bound(share: Fraction, names: int) -> Fraction:
    """Return the maximum error of a count, as documented by StrideSchedule."""
    return (1 + share * (names - 2)) / 2


def assert_in_proportion(weights: dict[str, float], counts: dict[str, int], places: int) -> None:
    assert sum(counts.values()) == places
    for name in weights:
        share = share_of(name, weights)
        assert abs(counts.get(name, 0) - places * share) <= bound(share, len(weights))


@settings(max_examples=60)
@given(WEIGHTS)
def test_names_follow_in_the_order_of_stride_scheduling_and_in_proportion(weights):
    """A client's pass grows by its stride at each turn; the lowest pass is next."""
    strides = {name: 1 / share_of(name, weights) for name in weights}
    passes = {name: stride / 2 for name, stride in strides.items()}
    schedule = StrideSchedule(weights)
    counts = Counter()
    for place in range(120):
        name, before = schedule.at(place)
        assert (name, before) == (min(passes, key=passes.__getitem__), counts[name])
        passes[name] += strides[name]
        counts[name] += 1
        assert_in_proportion(weights, counts, place + 1)


@settings(max_examples=100)
@given(WEIGHTS, st.integers(0, 10**15))
def test_far_places_are_as_even_and_agree_with_their_counts(weights, place):
    schedule = StrideSchedule(weights | {"never": 0.0})
    before = Counter(schedule.counts(place))
    assert_in_proportion(weights, before, place)
    name, shown = schedule.at(place)
    assert shown == before[name]
    before[name] += 1
    assert before == Counter(schedule.counts(place + 1))


@pytest.mark.parametrize("names", [2, 3, 12])
def test_the_bound_is_nearly_reached(names):
    """One heavy name beside equal others, which are all due at the same time, reaches it."""
    heavy = 10 * (names - 1)
    weights = {f"t{i}": 1.0 for i in range(names - 1)} | {"heavy": float(heavy)}
    share = share_of("heavy", weights)
    counts = [StrideSchedule(weights).counts(place)["heavy"] for place in range(12 * names)]
    off = max(abs(count - place * share) for place, count in enumerate(counts))
    assert bound(share, names) - Fraction(1, 2) < off <= bound(share, names)


def test_integer_weights_are_exact_after_each_period():
    schedule = StrideSchedule({"a": 5, "b": 3, "c": 2})
    names = [schedule.at(place)[0] for place in range(40)]
    assert names == names[:10] * 4
    assert Counter(names[:10]) == {"a": 5, "b": 3, "c": 2}
