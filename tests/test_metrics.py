"""Metrics merge exactly, each by its own rule."""

import math
import pickle
import random
import statistics

import pytest

from rl.metrics import Metrics, Value, merged_values


def test_each_rule_merges_as_if_all_had_been_reduced_at_once():
    values = [3.0, 1.0, 2.0]
    weights = [10.0, 0.0, 30.0]

    def metrics(value: float, weight: float) -> Metrics:
        entries = {
            rule: Value(value, rule, weight) for rule in ("mean", "max", "min", "sum", "last")
        }
        return Metrics(entries)

    merged = Metrics.merged(map(metrics, values, weights))
    assert dict(merged) == {"mean": 2.25, "max": 3.0, "min": 1.0, "sum": 6.0, "last": 2.0}
    nested = Metrics.merged(
        [Metrics.merged(map(metrics, values[:2], weights[:2])), metrics(2.0, 30.0)]
    )
    assert nested == merged


def test_a_mean_over_nothing_does_not_spoil_the_others():
    nothing = Metrics({"loss": Value(math.nan, "mean", 0.0)})
    something = Metrics({"loss": Value(2.0, "mean", 4.0)})
    assert Metrics.merged([nothing, something, nothing])["loss"] == 2.0


@pytest.mark.parametrize("rule", ["mean", "max", "min", "sum", "std"])
def test_a_value_that_is_not_finite_stays_visible(rule):
    parts = [Metrics({"loss": Value.of(value, rule)}) for value in (1.0, math.nan, 2.0)]
    assert math.isnan(Metrics.merged(parts)["loss"])


def test_names_of_some_parts_alone_are_kept():
    parts = [Metrics({"a": Value(1.0)}), Metrics({"b": Value(2.0, "max")})]
    assert dict(Metrics.merged(parts)) == {"a": 1.0, "b": 2.0}
    assert dict(Metrics.merged([])) == {}


def test_metrics_read_as_a_mapping_and_cross_processes():
    metrics = Metrics({"trainer/lr": Value(0.1, "last")}).renamed(str.upper)
    assert pickle.loads(pickle.dumps(metrics)) == {"TRAINER/LR": 0.1}
    assert {**metrics, "x": 1.0} == {"TRAINER/LR": 0.1, "x": 1.0}
    with pytest.raises(KeyError):
        metrics["trainer/lr"]


@pytest.mark.parametrize("offset", [0.0, 1e9])
def test_a_standard_deviation_is_that_of_all_numbers_however_they_are_grouped(offset):
    draw = random.Random(0)
    numbers = [offset + draw.gauss(3, 2) for _ in range(60)]
    weights = [draw.choice([0, 1, 2, 5]) for _ in numbers]
    everything = [number for number, n in zip(numbers, weights, strict=True) for _ in range(n)]
    parts = [Value.of(*pair) for pair in zip(numbers, ["std"] * 60, weights, strict=True)]
    groups = [merged_values(parts[first : first + 7]) for first in range(0, 60, 7)]
    for whole in (merged_values(parts), merged_values(groups)):
        assert whole.value == pytest.approx(statistics.pstdev(everything), rel=1e-6)
        assert whole.mean == pytest.approx(statistics.fmean(everything), rel=1e-12)
        assert whole.weight == sum(weights)


def test_numbers_are_reduced_at_once_and_weigh_what_is_said():
    assert Value.over([1.0, 3.0], "std").value == 1.0
    assert Value.over([1.0, 3.0]).value == 2.0
    parts = [Metrics({"score": 1.0}, weight=3.0), Metrics({"score": 5.0})]
    assert Metrics.merged(parts)["score"] == 2.0


def test_one_name_has_one_rule():
    parts = [Metrics({"loss": Value(1.0, rule)}) for rule in ("mean", "max")]
    with pytest.raises(ValueError, match="metric 'loss' is reduced by mean and by max"):
        Metrics.merged(parts)


def test_metrics_show_their_values():
    assert repr(Metrics({"loss/mean": Value(1.5, weight=3)})) == "Metrics({'loss/mean': 1.5})"
