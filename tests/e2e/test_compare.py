"""The program that compares generator and trainer of a recorded run."""

import pytest

from rl.compare.__main__ import main
from tests.e2e.test_programs import accepted, answer_of
from tests.kit.runs import TINY

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    ("options", "least", "most"),
    [
        ("--step 4", 0, 1e-5),
        ("--step 3 --rollout 1", 0, 1e-5),
        ("--step 3 --under tp2", 0, 1e-5),
        # the recorded log-probs are float32; rounding to bfloat16 explains all modules
        ("--step 3 --generator.dtype bfloat16", 1e-4, 0.1),
    ],
)
def test_both_sides_of_a_run_are_equal_beyond_rounding(recorded, tmp_path, options, least, most):
    folder = recorded().folder
    program, row = answer_of("rl.compare", folder, tmp_path / "compare", *options.split())
    assert program.process.returncode == 0, program.stderr + program.stdout
    assert row["findings"] == []
    assert least <= max(row["modules"].values()) < most
    assert "layers.1.attention.inner_attention" in row["modules"]
    if "--rollout" in options:
        assert row["rollout"] == 1


def test_a_run_in_bfloat16_is_equal_in_float32(finished, tmp_path):
    """As docs/compare.md advises."""
    sampled = ("--generator.dtype", "bfloat16", "--steps", "1")
    folder = finished(
        *TINY, *sampled, "--trainer.training.mixed_precision_param", "bfloat16"
    ).folder
    options = "--generator.dtype float32 --trainer.training.mixed_precision_param float32"
    program, row = answer_of(
        "rl.compare", folder, tmp_path / "compare", "--step", "1", *options.split()
    )
    assert program.process.returncode == 0, program.stderr + program.stdout
    assert row["findings"] == []


REFUSED = {
    "--step 0": "--step is 0; it must be at least 1",
    "--step 99": "--step 99: the rollouts of step",
    "--step 3 --rollout 9999": "--rollout is 9999; step 3 has the rollouts 0 to",
    "--step 3 --under cp2": "context_parallel_degree is 2",
    "--step 3 --under x2": "--under x2: 'x2' is not a degree",
}


def test_a_comparison_that_cannot_run_is_refused(recorded):
    assert accepted(main, recorded().folder, REFUSED) == {}
