"""The tool quickstart: demonstrations, then reinforcement of tool calls."""

import subprocess
import sys
from itertools import pairwise

import pytest

from tests.e2e.runs import Run

SCRIPT = [sys.executable, "scripts/make_tiny_model.py", "--calculator"]
SHORT = ["--rollout.prompts_per_step", "2", "--rollout.samples_per_prompt", "4"]
SMALL = [
    "--evaluation.prompts",
    "4",
    "--evaluation.samples",
    "0",
    "--generator.kv_cache_gib",
    "0.1",
]


def shown(folder, seed, *arguments):
    """Return the folder of a model that has seen demonstrations."""
    model = str(folder / "base")
    data = str(folder / "sums.jsonl")
    made = ["--model-dir", model, "--data", data, "--lines", "600", "--seed", str(seed)]
    subprocess.run([*SCRIPT, *made], check=True, timeout=120, capture_output=True)
    inputs = ["--model.hf_path", model, "--task.path", data, "--seed", str(seed)]
    run = Run("--config", "tool_demonstrations", *inputs, *arguments, folder=folder / "shown")
    assert run.wait() == 0, run.stderr
    return run.folder / "export"


def test_a_model_that_saw_tool_calls_makes_them_and_is_trained_on_both_turns(tmp_path):
    model = shown(tmp_path, 0, "--steps", "100", "--examples_per_step", "8")
    start = ["--config", "tool_quickstart", "--model.hf_path", str(model), "--steps", "2"]
    run = Run(*start, *SHORT, *SMALL, "--rollout.recorded_per_step", "8", folder=tmp_path / "run")
    assert run.wait() == 0, run.stderr
    run.assert_nothing_left()
    rollouts = run.lines("rollouts.jsonl")
    assert len(rollouts) == 16
    called = [rollout for rollout in rollouts if rollout["metrics"]["turns"] == 2]
    assert len(called) >= 8
    for rollout in called:
        (sequence,) = rollout["sequences"]
        assert sum(b > a for a, b in pairwise(sequence["sampled"])) == 2
        assert len(rollout["turn_rewards"]) == 2
        assert "<tool_response>" in rollout["completion"]
    rows = run.metrics()
    assert max(row["logprob/error_max"] for row in rows) <= 1e-4
    assert all(0 <= row["reward/mean"] <= 1 for row in rows)


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1])
def test_tool_quickstart_learns_to_use_a_tool(tmp_path, seed):
    model = shown(tmp_path, seed)
    start = ["--config", "tool_quickstart", "--model.hf_path", str(model)]
    run = Run(*start, "--seed", str(seed), folder=tmp_path / "run")
    assert run.wait() == 0, run.stderr
    assert run.metrics()[0]["reward/mean"] < 0.9
    assert run.json("summary.json")["eval/exact_match"] >= 0.9
