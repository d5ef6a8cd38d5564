"""The engine runs on a GPU under every kind of layout, with the memory that the plan computes."""

import pytest

from tests.kit.tables import cases
from tests.plan.rehearsal.layouts import LAYOUTS, TOGETHER
from tests.plan.rehearsal.rehearsals import is_known, moved_bytes, planned_bytes, waits_of

SMALL = 4 << 20
"""Bytes that collectives of a few numbers may move in a step."""


@pytest.mark.parametrize("name", cases(LAYOUTS, TOGETHER))
def test_a_layout_runs_as_planned_without_other_waits(name, rehearsals):
    found = rehearsals.of(LAYOUTS[name])
    check_run(found)
    reduced = [each for each in found["collectives"] if each["phase"] == "optim_step 2"]
    assert all(each["count"] == 1 for each in reduced)
    routed = [each for each in reduced if "routing.py" in each["line"]]  # of models with experts
    assert len(routed) <= 1
    assert len(reduced) - len(routed) <= 2  # of the weight, and of the gradient norm


@pytest.mark.long
def test_the_last_rank_runs_too(rehearsals):
    check_run(rehearsals.of(LAYOUTS["EP 8"], rank=15))


def check_run(found: dict) -> None:
    """Raise AssertionError unless a rehearsal went as planned and waited at known lines only."""
    assert found["error"] is None
    check_memory(found)
    check_collectives(found)
    assert [wait for wait in waits_of(found) if not is_known(wait)] == []


def check_memory(found: dict) -> None:
    """Raise AssertionError unless the memory of a rehearsal is that of the plan."""
    planned = dict(found["planned"])
    planned["parameters"] += planned.pop("adapters", 0)
    planned["buffers"] = planned.pop("RoPE tables")
    kept = found["kept"]
    counters = kept["buffers"] - planned["buffers"]  # of the tokens of experts
    assert 0 <= counters <= planned["buffers"] / 1000
    assert all(planned.get(name, 0) == kept[name] for name in kept if name != "buffers")
    total = planned_bytes(planned)
    assert found["peak"] <= total <= 1.15 * found["peak"]


def check_collectives(found: dict) -> None:
    """Raise AssertionError unless the collectives of large tensors move the bytes of the plan."""
    for phase, moved in moved_bytes(found).items():
        planned = found["planned_moves"][phase]
        for kind in {*moved, *planned}:
            assert planned[kind] == pytest.approx(moved[kind], rel=0.01, abs=SMALL), (phase, kind)
