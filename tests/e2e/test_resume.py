"""A run is a function of its config, also when the program is killed on the way (C6)."""

import json
import random
import signal
import time

import pytest

from rl.observe.spans import STAGES
from tests.e2e.held import Hold
from tests.e2e.pipelines import EXPERTS, GROUPS, HYBRID, SHORT, SHORT_STEPS
from tests.e2e.test_programs import answer_of
from tests.kit.runs import TINY, Run, assert_same, check_ledger, start, strike

WITH_EXPERTS = (*EXPERTS, "--model.family", "qwen3_5_moe_text")


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
    check_ledger(run, SHORT_STEPS, GROUPS, bound=2)
    assert "resumed after step " in run.stdout
    assert f"ignored checkpoints/{incomplete.name}: it is incomplete" in run.stdout
    assert "resuming with another" not in run.stdout


def test_sampling_ahead_hides_what_it_overlaps(finished):
    rows = finished(*SHORT).metrics()
    assert [row["rollout/staleness_max"] for row in rows] == [0, 1, *[2] * (SHORT_STEPS - 2)]
    assert max(row["push/canary"] for row in rows if "push/canary" in row) < 1e-4
    assert max(row["timing/push_pause"] for row in rows if "timing/push_pause" in row) > 0
    hidden = [row["timing/hidden"] for row in rows]
    assert max(hidden) > 0
    stages = sum(row.get(f"timing/{name}", 0.0) for row in rows for name in STAGES)
    assert stages - sum(hidden) <= 1.001 * sum(row["timing/step"] for row in rows)


@pytest.mark.long
def test_a_resume_that_cannot_load_its_checkpoint_leaves_the_run_as_it_was(tmp_path):
    command = (*TINY, "--steps", "2", "--trainer.checkpoint.interval", "1")
    run = start(tmp_path, command)
    assert run.wait() == 0, run.stderr
    failure = run.folder / "failure.json"
    failure.write_text('{"error": "of an earlier attempt"}')
    files = [failure, *run.folder.glob("*.json*"), *run.folder.glob("checkpoints/*/*")]
    files = [path for path in files if path.is_file() and path.name != "owner.json"]
    before = {path: path.read_bytes() for path in files}
    again = start(tmp_path, (*command, "--model.dim", "48"))
    assert again.wait() == 1
    assert "the run did not resume with another model.dim" in again.stderr
    assert {path: path.read_bytes() for path in before} == before
    cause = json.loads((run.folder / "logs" / "resume-failure.json").read_text())
    assert cause["error"] in again.stderr
    export, _ = answer_of("rl.export", run.folder, tmp_path / "a", str(tmp_path / "exported"))
    replay, found = answer_of("rl.replay", run.folder, tmp_path / "b", "--step", "2")
    assert (export.process.returncode, found["equal"]) == (0, True), export.stderr + replay.stderr


@pytest.mark.long
@pytest.mark.parametrize("options", [(), WITH_EXPERTS])
def test_a_hybrid_that_is_killed_is_the_undisturbed_one(tmp_path, options):
    command = (*HYBRID, "--steps", "6", *options)
    for name in ("killed", "whole"):
        (tmp_path / name).mkdir()
    run = start(tmp_path / "killed", command)
    run.until((run.folder / "checkpoints" / "step-3" / ".metadata").exists)
    run.kill()
    run.assert_nothing_left()
    run, whole = start(tmp_path / "killed", command), start(tmp_path / "whole", command)
    for each in (run, whole):
        assert each.wait() == 0, each.stderr
        each.assert_nothing_left()
    assert "resumed after step " in run.stdout
    assert_same(run, whole)


MOMENTS = ["start", "start", "save", "save", "evaluation", "evaluation", *["step"] * 4]
KINDS = (
    *("lockstep", "two ahead", "sft", "dpo", "tools", "tools, two ahead", "experts", "hybrid"),
    "bitwise",
)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_ten_moments_a_run_is_the_undisturbed_one(tmp_path, finished, arguments, kind):
    """Three of the moments are inside a tool, if the run has tools."""
    rng = random.Random(kind)
    hold = Hold(tmp_path)
    command = arguments(kind, steps=300)  # those on examples are short
    whole = finished(*command)
    last = len(whole.metrics())
    moments = [*["tool"] * 3, *MOMENTS[:-3]] if "tools" in kind else [*MOMENTS]
    for step in sorted(rng.randrange(last - last // 3) for _ in moments):
        run = start(tmp_path, command)
        moment = moments.pop(rng.randrange(len(moments)))
        wait_for(run, moment, step, rng, hold)
        print(f"killed at {moment} after step {len(run.metrics())}")
        run.kill()
        if moment == "tool":
            hold.end()
        run.assert_nothing_left()
    run = start(tmp_path, command)
    assert run.wait() == 0, run.stderr
    run.assert_nothing_left()
    assert_same(run, whole)


def wait_for(run: Run, moment: str, step: int, rng: random.Random, hold: Hold) -> None:
    """Wait until the run is at a ``moment`` after ``step``."""
    if moment == "start":
        run.until_some_time_of_the_start(rng)
        return
    run.until(lambda: len(run.metrics()) > step)
    if moment == "tool":
        hold.begin()
        run.until(lambda: hold.has_caught)
    elif moment == "save":
        known = {*run.folder.glob("checkpoints/step-*")}
        run.until(lambda: bool({*run.folder.glob("checkpoints/step-*")} - known))
    elif moment == "evaluation":
        config = run.json("config.json")["config"]
        every = config.get("validate_every") or config["evaluation"]["every"]
        run.until(lambda: len(run.metrics()) % every in (0, 1))
    else:
        time.sleep(rng.uniform(0, 0.5))
