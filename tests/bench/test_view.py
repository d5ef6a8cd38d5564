"""The benchmark of the pages: the keys that budgets are read from."""

import json

import pytest

from tests.bench.programs import python

pytestmark = pytest.mark.long


def test_the_first_page_of_a_short_run_is_timed_and_the_last_line_is_json():
    options = ("--steps", "50", "--repeats", "1", "--json")
    _, last = python("scripts/bench/view.py", *options).splitlines()
    result = json.loads(last)
    assert result["steps"] == 50
    assert result["refresh_s"] > 0 and result["rollouts_s"] > 0
    assert result["first_page_s"] > 0
    assert 10_000 < result["bytes"] <= 500_000
