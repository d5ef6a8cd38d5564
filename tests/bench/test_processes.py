"""The benchmark of a run's processes: every process is counted, in a start and in a step."""

import json

import pytest

from tests.bench.programs import python

pytestmark = pytest.mark.long


def test_each_process_of_a_run_is_counted_and_the_last_line_is_json():
    script = ("scripts/bench/processes.py", "--only", "quickstart, lockstep", "--steps", "5")
    *_, last = python(*script, "--json").splitlines()
    ((name, found),) = json.loads(last).items()
    assert name == "quickstart, lockstep"
    for part in ("start", "step"):
        cpu = found[f"{part}_cpu_s"]
        assert {"controller", "trainer-0", "generator-0-0", "reward-0-0"} <= set(cpu)
        assert min(cpu["trainer-0"], cpu["generator-0-0"]) > 0.01
        assert found[f"{part}_wall_s"] > 0
