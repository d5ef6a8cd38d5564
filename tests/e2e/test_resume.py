"""A run is a function of its config, also when the program is killed on the way (C6)."""

import random
import signal
import time

import pytest

from rl.observe.spans import STAGES
from tests.e2e.pipelines import LOCKSTEP, SHORT, SHORT_STEPS, STEPS, TWO_AHEAD
from tests.e2e.runs import Run, digest, dropped, numbers, start, trained
from tests.e2e.test_chaos import check_ledger, strike


def assert_same(run: Run, whole: Run) -> None:
    """Bit for bit: numbers, rollouts, the ledger, evaluations and the last weight."""
    assert numbers(run, "push/") == numbers(whole, "push/")
    assert run.rollouts() == whole.rollouts()
    assert trained(run) == trained(whole)
    assert dropped(run) == dropped(whole)
    assert run.lines("evaluations.jsonl") == whole.lines("evaluations.jsonl")
    assert digest(run) == digest(whole)


def test_a_run_that_is_struck_and_stopped_and_killed_is_the_undisturbed_one(tmp_path, finished):
    """Its trainer dies and Ctrl-C follows; then a generator hangs and the program is killed."""
    whole = finished(*SHORT)
    run = start(tmp_path, SHORT)
    run.until(lambda: len(run.metrics()) >= 1 and "push over" in run.stdout)
    assert strike(run, "trainer", signal.SIGKILL)
    run.until_step(4)
    run.interrupt()
    assert run.wait() == 130
    run.assert_nothing_left()
    saved = len(run.metrics())
    assert f"interrupted by SIGINT after step {saved}; go on from step {saved} with: " in run.stderr
    assert "--resume" in run.stderr
    assert "Traceback" not in run.stderr
    assert (run.folder / "checkpoints" / f"step-{saved}" / ".metadata").exists()

    run = start(tmp_path, SHORT)
    run.until_step(saved + 1)
    assert strike(run, "generator-1", signal.SIGSTOP)
    run.until_step(saved + 3)
    run.kill()
    run.assert_nothing_left()
    incomplete = run.folder / "checkpoints" / f"step-{SHORT_STEPS - 1}"
    incomplete.mkdir()  # as a kill in the middle of a save leaves it

    run = start(tmp_path, SHORT)
    assert run.wait() == 0, run.stderr
    run.assert_nothing_left()
    assert_same(run, whole)
    check_ledger(run, SHORT_STEPS, bound=2)
    assert "resumed after step " in run.stdout
    assert f"ignored checkpoints/{incomplete.name}: it is incomplete" in run.stdout
    assert "resuming with another" not in run.stdout


def test_sampling_ahead_hides_what_it_overlaps(finished):
    rows = finished(*SHORT).metrics()
    assert [row["rollout/staleness_max"] for row in rows] == [0, 1, *[2] * (SHORT_STEPS - 2)]
    assert max(row["push/canary"] for row in rows if "push/canary" in row) < 1e-4
    assert max(row["timing/push_pause"] for row in rows if "timing/push_pause" in row) > 0
    assert max(row["timing/hidden"] for row in rows) > 0
    stages = sum(row.get(f"timing/{name}", 0.0) for row in rows for name in STAGES)
    assert stages - sum(row["timing/hidden"] for row in rows) <= 1.001 * sum(
        row["timing/step"] for row in rows
    )


@pytest.mark.long
@pytest.mark.parametrize("pipeline", [LOCKSTEP, TWO_AHEAD])
def test_killed_ten_times_at_random_moments(tmp_path, finished, pipeline):
    rng = random.Random(len(pipeline))
    whole = finished(*pipeline)
    for step in sorted(rng.randrange(STEPS - 12) for _ in range(10)):
        run = start(tmp_path, pipeline)
        moment = rng.choice(["start", "step", "save", "evaluation"])
        if moment == "start":
            run.until_some_time_of_the_start(rng)
        else:
            run.until(
                lambda run=run, step=step: "push over" in run.stdout and len(run.metrics()) >= step
            )
        if moment == "save":
            saved = {*run.folder.glob("checkpoints/step-*/.metadata")}
            run.until(
                lambda run=run, saved=saved: (
                    {*run.folder.glob("checkpoints/step-*")} - {p.parent for p in saved}
                )
            )
        elif moment == "evaluation":
            run.until(
                lambda run=run: len(run.metrics()) % 5 in (1, 2)
            )  # the evaluation after a fifth step is running or about to start
        else:
            time.sleep(rng.uniform(0, 0.5))
        print(f"kill at {moment} after step {len(run.metrics())}")
        run.kill()
        run.assert_nothing_left()
    run = start(tmp_path, pipeline)
    assert run.wait() == 0, run.stderr
    run.assert_nothing_left()
    assert_same(run, whole)
