"""Metrics merge exactly, each by its own rule."""

import math
import pickle

import pytest

from rl.metrics import Metrics, Value


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


@pytest.mark.parametrize("rule", ["mean", "max", "min", "sum"])
def test_a_value_that_is_not_finite_stays_visible(rule):
    parts = [Metrics({"loss": Value(value, rule)}) for value in (1.0, math.nan, 2.0)]
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
