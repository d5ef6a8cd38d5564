"""The benchmark of a server of Tinker's API, as far as it goes without the SDK."""

import json

import pytest

from tests.kit.scripts import module_fixture

bench = module_fixture("scripts/bench/tinker.py")


def test_ratios_are_those_of_each_round_without_the_first_steps(bench):
    def side(seconds, rate):
        steps = [99.0] * bench.WARM_UP + [seconds] * 3
        waits = [1.0, 2.0, 60 / rate]
        found = {"seconds": steps, "samples_per_s": rate, "waits": waits}
        return found | {"flood_waits": [2 * wait for wait in waits]}

    rounds = [(side(0.9, 50.0), side(1.0, 40.0)), (side(0.8, 50.0), side(1.0, 30.0))]
    turns = [(2.0, 2.2), (2.0, 2.0), (2.0, 3.0)]
    result = bench.result_of([*rounds, (side(1.0, 60.0), side(1.0, 60.0))], turns)
    assert result["session_over_server"] == 0.9
    assert result["server_over_session_samples"] == 0.8
    assert result["largest_wait_over_mean"] == 2 / 1.5
    assert result["largest_flood_wait_over_mean"] == 2 / 1.5
    assert result["two_adapters_over_one"] == 1.1
    assert result["spread"] == {
        "largest_wait_over_mean": [1.2, 1.5],
        "largest_flood_wait_over_mean": [1.2, 1.5],
        "session_over_server": [0.8, 1.0],
        "server_over_session_samples": [0.6, 1.0],
        "two_adapters_over_one": [1.0, 1.5],
    }
    assert result["seconds_per_step"] == {"session": 0.9, "server": 1.0}
    assert json.loads(json.dumps(result)) == result


@pytest.mark.long
def test_the_session_trains_and_samples(bench, tmp_path):
    bench.write_model(tmp_path / "model", bench.MODEL)
    found = bench.run_session(tmp_path / "model", 6)
    assert len(found["seconds"]) == 6
    assert found["samples_per_s"] > 0
    assert len(found["waits"]) == 64
