"""A run that is left while it evaluates leaves at once, and repeats the evaluation (C6)."""

import time

import pytest

from tests.e2e.pipelines import LOCKSTEP, TWO_AHEAD
from tests.e2e.runs import Run, digest, numbers

SLOW = (
    *("--steps", "8", "--trainer.checkpoint.interval", "100"),
    *("--evaluation.prompts", "100", "--generator.max_running_requests", "2"),
)


@pytest.mark.long
@pytest.mark.parametrize("pipeline", [LOCKSTEP, TWO_AHEAD], ids=["lockstep", "two ahead"])
def test_a_run_that_leaves_while_it_evaluates_repeats_the_evaluation_from_the_same_weights(
    tmp_path, finished, pipeline
):
    whole = finished(*pipeline, *SLOW)
    run = Run(*pipeline, *SLOW, folder=tmp_path / "run")
    saved = run.folder / "checkpoints" / "step-5" / ".metadata"
    run.until(lambda: saved.exists() and len(run.metrics()) >= 6)
    told = time.monotonic()
    run.process.terminate()
    assert run.wait() == 75, run.stderr
    took = time.monotonic() - told
    run.assert_nothing_left()
    assert [*run.folder.glob("checkpoints/*/.metadata")] == [saved]
    assert run.lines("evaluations.jsonl") == []
    print(f"left {took:.1f} s after the signal, after step {len(run.metrics())}")

    run = Run(*pipeline, *SLOW, "--resume", folder=tmp_path / "run")
    run.until(lambda: (run.folder / "export").exists())
    assert run.lines("evaluations.jsonl") == whole.lines("evaluations.jsonl") != []
    run.until(lambda: (run.folder / "summary.json").exists())
    run.process.terminate()
    assert run.wait() == 75, run.stderr
    run.assert_nothing_left()

    run = Run(*pipeline, *SLOW, "--resume", folder=tmp_path / "run")
    assert run.wait() == 0, run.stderr
    assert run.lines("evaluations.jsonl") == whole.lines("evaluations.jsonl")
    assert numbers(run, "push/") == numbers(whole, "push/")
    assert digest(run) == digest(whole)
    assert (
        run.json("summary.json")["eval/exact_match"]
        == whole.json("summary.json")["eval/exact_match"]
    )
