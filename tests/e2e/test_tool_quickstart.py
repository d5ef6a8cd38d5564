"""The tool quickstart: demonstrations, then reinforcement of tool calls."""

import random
import time
from itertools import pairwise

import pytest

from tests.e2e.runs import Run, make_sums, start
from tests.e2e.test_resume import assert_same
from tests.tasks.held import Hold

SHORT = ["--rollout.prompts_per_step", "2", "--rollout.samples_per_prompt", "4"]
SMALL = [
    "--evaluation.prompts",
    "4",
    "--evaluation.samples",
    "0",
    "--generator.kv_cache_gib",
    "0.1",
]


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


STEPS = 12
PIPELINES = {
    "lockstep": (),
    "two ahead": ("--rollout.max_staleness", "2", "--generator.replicas", "2"),
}
MOMENTS = [*["tool"] * 3, *["step"] * 3, "start", "save", "save", "evaluation"]


@pytest.mark.long
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_killed_at_ten_moments_three_of_them_inside_a_tool(tmp_path, finished, caller, pipeline):
    rng = random.Random(pipeline)
    hold = Hold(tmp_path)
    arguments = (
        *("--config", "tests.e2e.configs.held_tools", "--model.hf_path", caller),
        *("--task.folder", str(tmp_path), "--steps", str(STEPS), *SHORT, *SMALL),
        *("--evaluation.every", "5", "--trainer.checkpoint.interval", "2"),
        # A larger step may teach the policy to call no tools.
        *("--trainer.optimizer.param_groups.0.optimizer_kwargs.lr", "1e-5"),
        *PIPELINES[pipeline],
    )
    whole = finished(*arguments)
    steps = sorted(rng.randrange(STEPS - 4) for _ in MOMENTS)
    for step, moment in zip(steps, rng.sample(MOMENTS, len(MOMENTS)), strict=True):
        run = start(tmp_path, arguments)
        wait_for(run, moment, step, rng, hold)
        print(f"kill at {moment} after step {len(run.metrics())}")
        run.kill()
        if moment == "tool":
            hold.end()
        run.assert_nothing_left()
    run = start(tmp_path, arguments)
    assert run.wait() == 0, run.stderr
    run.assert_nothing_left()
    assert_same(run, whole)


def wait_for(run: Run, moment: str, step: int, rng: random.Random, hold: Hold) -> None:
    """Wait until the run is at a ``moment`` after ``step``."""
    if moment == "start":
        run.until_some_time_of_the_start(rng)
        return
    run.until(lambda: "push over" in run.stdout and len(run.metrics()) > step)
    if moment == "tool":
        hold.begin()
        run.until(lambda: hold.has_caught)
    elif moment == "save":
        known = {*run.folder.glob("checkpoints/step-*")}
        run.until(lambda: bool({*run.folder.glob("checkpoints/step-*")} - known))
    elif moment == "evaluation":
        run.until(lambda: len(run.metrics()) % 5 in (0, 1))
    else:
        time.sleep(rng.uniform(0, 0.5))
