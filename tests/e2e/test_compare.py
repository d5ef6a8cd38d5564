"""The program that compares generator and trainer of a recorded run."""

from pathlib import Path

import pytest

from rl.compare import main
from tests.e2e.test_algorithms import MANY_MODELS
from tests.e2e.test_programs import Program, accepted, answer_of


def compare(folder: Path, tmp_path: Path, *arguments: str) -> tuple[Program, dict]:
    """Return the ended program, and its JSON."""
    return answer_of("rl.compare", folder, tmp_path / "compare", *arguments)


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [("--step", "4"), ("--step", "3", "--rollout", "1"), ("--step", "3", "--under", "tp2")],
    ids=["critic, reference, adapter", "one rollout", "another layout"],
)
def test_both_sides_of_a_run_are_equal_beyond_rounding(finished, tmp_path, options):
    program, row = compare(finished(*MANY_MODELS).folder, tmp_path, *options)
    assert program.process.returncode == 0, program.stderr + program.stdout
    assert row["findings"] == []
    assert max(row["modules"].values()) < 1e-5
    assert "layers.1.attention.inner_attention" in row["modules"]
    if "--rollout" in options:
        assert row["rollout"] == 1


@pytest.mark.long
def test_a_generator_of_another_type_is_found(finished, tmp_path):
    """The recorded log-probs are float32; rounding to bfloat16 explains all modules."""
    folder = finished(*MANY_MODELS).folder
    program, row = compare(folder, tmp_path, "--step", "3", "--generator.dtype", "bfloat16")
    assert program.process.returncode == 0, program.stderr + program.stdout
    assert 1e-4 < max(row["modules"].values()) < 0.1


REFUSED = {
    ("--step", "0"): "--step is 0; it must be at least 1",
    ("--step", "99"): "--step 99: the rollouts of step",
    ("--step", "3", "--rollout", "9999"): "--rollout is 9999; step 3 has the rollouts 0 to",
    ("--step", "3", "--under", "cp2"): "context_parallel_degree is 2",
    ("--step", "3", "--under", "x2"): "--under x2: 'x2' is not a degree",
}


def test_a_comparison_that_cannot_run_is_refused(finished):
    assert accepted(main, finished(*MANY_MODELS).folder, REFUSED) == {}
