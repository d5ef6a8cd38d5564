"""A run that is left while it evaluates leaves at once, and repeats the evaluation (C6)."""

import signal
import time

import pytest

from tests.e2e.pipelines import LOCKSTEP, TWO_AHEAD
from tests.kit.runs import Run, assert_same, start, words

SLOW = (
    *words("--steps 8 --trainer.checkpoint.interval 100"),
    *words("--evaluation.prompts 100 --generator.max_running_requests 2"),
)


@pytest.mark.long
@pytest.mark.parametrize("pipeline", [LOCKSTEP, TWO_AHEAD], ids=["lockstep", "two ahead"])
def test_a_run_that_leaves_while_it_evaluates_repeats_the_evaluation_from_the_same_weights(
    tmp_path, finished, pipeline
):
    def leave(run: Run) -> None:
        told = time.monotonic()
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 75, run.stderr
        print(f"left {time.monotonic() - told:.1f} s after the signal")
        run.assert_nothing_left()

    arguments = (*pipeline, *SLOW)
    whole = finished(*arguments)
    run = start(tmp_path, arguments)
    saved = run.folder / "checkpoints" / "step-5" / ".metadata"
    run.until(lambda: saved.exists() and len(run.metrics()) >= 6)
    leave(run)
    assert [*run.folder.glob("checkpoints/*/.metadata")] == [saved]
    assert [row["step"] for row in run.lines("evaluations.jsonl")] == [0]

    run = start(tmp_path, arguments)
    run.until(lambda: (run.folder / "export").exists())
    assert run.lines("evaluations.jsonl") == whole.lines("evaluations.jsonl") != []
    run.until(lambda: (run.folder / "summary.json").exists())
    leave(run)

    run = start(tmp_path, arguments)
    assert run.wait() == 0, run.stderr
    assert_same(run, whole)
