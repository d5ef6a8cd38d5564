"""The benchmark of overlap: lockstep and the pipelines in one run, and no token older than it may
be.
"""

import json

import pytest

from tests.bench.programs import python

pytestmark = pytest.mark.long


def test_lockstep_and_pipelines_are_measured_and_no_token_is_older_than_its_bound():
    printed = python(
        "scripts/bench/overlap.py", "--tiny", "--rounds", "1", "--steps", "2", "--json"
    ).splitlines()
    result = json.loads(printed[-1])
    assert list(result["modes"]) == [
        "lockstep",
        "deterministic 1",
        "deterministic 2",
        "asynchronous 2",
    ]
    alone = result["modes"]["lockstep"]
    for row in result["modes"].values():
        assert (
            row["step_over_max_stage"]
            == row["step_s"] / max(alone["generate_s"], alone["train_s"])
            > 0
        )
        assert max(map(int, row["staleness"])) <= row["max_staleness"]
    assert result["modes"]["lockstep"]["staleness"].keys() == {"0"}
    assert "2" in result["modes"]["deterministic 2"]["staleness"]
    assert result["step_over_max_stage"] == result["modes"]["asynchronous 2"]["step_over_max_stage"]
    assert result["two_over_one"] > 0
