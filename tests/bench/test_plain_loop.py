"""The benchmark against a plain loop: both sides learn, and the keys that budgets are read from."""

import json

import pytest

from tests.bench.programs import python

pytestmark = pytest.mark.long


def test_the_plain_side_learns_the_task():
    result = json.loads(python("scripts/bench/plain_grpo.py", "0", "0.9", "10"))
    assert 0.9 <= result["exact_match"] <= 1.0
    assert result["cpu_s"] > 0


def test_both_sides_learn_and_the_last_line_is_json():
    *_, last = python("scripts/bench/plain_loop.py", "--rounds", "1", "--json").splitlines()
    result = json.loads(last)
    low, high = result["spread"]
    assert low == high == result["ours_over_plain"]
    assert result["ours_over_plain"] == result["cpu_s_ours"] / result["cpu_s_plain"]
    assert result["steps_plain"] > 0 and result["steps_ours"] % 10 == 0
