"""The tool quickstart: demonstrations, then reinforcement of tool calls."""

from itertools import pairwise

import pytest

from tests.kit.runs import Run, make_sums


def test_a_model_that_saw_tool_calls_makes_them_and_is_trained_on_both_turns(calling):
    rollouts = calling.rollouts()
    assert len(rollouts) == 16
    called = [rollout for rollout in rollouts if rollout["metrics"]["turns"] == 2]
    assert len(called) >= 8
    for rollout in called:
        (sequence,) = rollout["sequences"]
        assert sum(b > a for a, b in pairwise(sequence["sampled"])) == 2
        assert len(rollout["turn_rewards"]) == 2
        assert "<tool_response>" in rollout["text"]
    rows = calling.metrics()
    assert max(row["logprob/error_max"] for row in rows) <= 1e-4
    assert all(0 <= row["reward/mean"] <= 1 for row in rows)


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1])
def test_tool_quickstart_learns_to_use_a_tool(tmp_path, seed):
    sums = make_sums(tmp_path, seed)
    shown = Run("--config", "tool_demonstrations", *sums, folder=tmp_path / "shown")
    assert shown.wait() == 0, shown.stderr
    start = ["--config", "tool_quickstart", "--model.hf_path", str(shown.folder / "export")]
    run = Run(*start, "--seed", str(seed), folder=tmp_path / "run")
    assert run.wait() == 0, run.stderr
    assert run.metrics()[0]["reward/mean"] < 0.9
    assert run.json("summary.json")["eval/exact_match"] >= 0.9
