"""The benchmark of the controller: both pipelines in one run, and the keys that budgets are read
from.
"""

import json

import pytest

from tests.bench.programs import python

pytestmark = pytest.mark.long


def test_runs_of_both_lengths_are_measured_in_both_pipelines_and_the_last_line_is_json():
    *table, last = python(
        "scripts/bench/controller.py", "--tiny", "--repeats", "1", "--json"
    ).splitlines()
    result = json.loads(last)
    cases = [(row["pipeline"], row["max_staleness"]) for row in result["pipelines"]]
    assert cases == [
        ("deterministic", 0),
        ("deterministic", 2),
        ("asynchronous", 0),
        ("asynchronous", 2),
    ]
    for row in result["pipelines"]:
        assert 0 <= row["staleness"] <= row["max_staleness"]
        assert row["cost_growth"] > 0 < row["cpu_us_per_rollout_short"]
        assert row["memory_growth"] > 0
    assert result["pipelines"][1]["staleness"] == 2
    assert result["rollouts_per_s"] == min(row["rollouts_per_s"] for row in result["pipelines"])
    assert result["cost_growth"] == max(row["cost_growth"] for row in result["pipelines"])
    assert [row["pipeline"] for row in result["generators"]] == ["deterministic", "asynchronous"]
    growths = [row["cost_growth"] for row in result["generators"]]
    assert result["cost_growth_generators"] == max(growths) > 0
    assert len(table) == len(cases) + len(growths) + 2
    assert 0 < result["checkpoint_pause_s"] < result["checkpoint_s"]
    assert result["checkpoint_bytes"] > 0
    assert 4 <= result["order_bytes_per_prompt"] < 5
    assert 0 < result["checkpoint_message_bytes"] < 1024 * 32 * 16  # rollouts are not sent
