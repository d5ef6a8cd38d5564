"""The benchmark of episodes: against a bare engine, and with many at once."""

import json

import pytest

from tests.bench.programs import python

pytestmark = pytest.mark.long


def test_episodes_are_compared_with_an_engine_and_the_last_line_is_json():
    *table, last = python(
        "scripts/bench/episodes.py", "--tiny", "--rounds", "1", "--repeats", "1", "--json"
    ).splitlines()
    result = json.loads(last)
    assert result["episodes"] == 200
    assert result["ours_over_engine"] > 0
    assert result["cpu_us_per_turn"] > 0
    assert result["cost_growth"] > 0
    # Two turns: 96 given, 8 sampled and 8 given tokens, of which three whole blocks are cached.
    assert result["cached"] == 96 / 112
    assert "200 episodes at once" in "".join(table)
