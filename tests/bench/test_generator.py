"""The ratios of the generator's benchmark."""

import pytest

from tests.kit.scripts import module

SCRIPT = "scripts/bench/generator.py"


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
