"""The generator's benchmark: actor, engine and vLLM's own model say the same, and all of them are
timed.
"""

import json

import pytest

from tests.bench.programs import module, python

SCRIPT = "scripts/bench/generator.py"


@pytest.mark.long
def test_all_sides_say_the_same_and_the_last_line_is_json():
    out = python(SCRIPT, "--tiny", "--rounds", "2", "--no-compile", "--json")
    result = json.loads(out.splitlines()[-1])
    assert result["greedy_alike"] == 1.0
    assert 0 < result["logprobs_apart"] < 1e-5
    assert result["tokens_per_s"].keys() == {"one_call", "groups", "unified_eager", "native_eager"}
    assert min(result["tokens_per_s"].values()) > 0
    assert result["ours_over_engine"] == min(
        result["ours_over_engine_one_call"], result["ours_over_engine_groups"]
    )
    assert result["unified_over_native"] == result["unified_over_native_eager"] > 0


def test_ratios_are_of_speeds_and_the_lesser_has_the_short_name(monkeypatch):
    generator = module(SCRIPT, monkeypatch)

    def works(wall_s, cpu_s):
        return [generator.Work([], wall_s, cpu_s)] * 3

    ratios = generator.ratios(
        {
            "one_call": works(1.0, 9.0),
            "groups": works(4.0, 9.0),
            "unified_eager": works(2.0, 4.0),
            "native_eager": works(9.0, 2.0),
            "unified_compiled": works(9.0, 3.0),
            "native_compiled": works(9.0, 6.0),
        },
        ("eager", "compiled"),
    )
    assert ratios == pytest.approx(
        {
            "ours_over_engine": 0.5,
            "ours_over_engine_one_call": 2.0,
            "ours_over_engine_groups": 0.5,
            "unified_over_native": 0.5,
            "unified_over_native_eager": 0.5,
            "unified_over_native_compiled": 2.0,
        }
    )
