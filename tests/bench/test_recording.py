"""The benchmark of recording: both sides in one run, and the bytes that are written."""

import json

import pytest

from tests.bench.programs import python

pytestmark = pytest.mark.long


def test_recording_everything_and_metrics_alone_are_measured_by_turns():
    printed = python(
        "scripts/bench/recording.py", "--rounds", "2", "--steps", "2", "--json"
    ).splitlines()
    result = json.loads(printed[-1])
    assert result["lowest"] <= result["recorded_over_bare"] <= result["highest"]
    assert result["step_s"].keys() == {"metrics", "everything"}
    assert min(result["kib_per_step"].values()) > 0.5
    assert result["events_kib_per_step"] > 0.5
