"""A run is a function of its config, also when it is killed on the way (C6)."""

from rl.observe.spans import STAGES
from tests.e2e.runs import TINY, Run

ARGUMENTS = [*TINY, "--steps", "8", "--trainer.checkpoint.interval", "2"]
AHEAD = ["--rollout.max_staleness", "1", "--weights.digests"]


def numbers(run: Run) -> list[dict]:
    """What the run computed at each step, without what it measured of time."""
    return [{k: v for k, v in row.items() if not k.startswith(("timing/", "tokens_per_s"))} for row in run.metrics()]


def test_killed_and_resumed_is_bit_for_bit_the_uninterrupted_run(tmp_path):
    whole = Run(*ARGUMENTS, folder=tmp_path / "whole")
    killed = Run(*ARGUMENTS, folder=tmp_path / "killed")
    killed.until_step(5)
    killed.kill()
    killed.assert_nothing_left()
    assert whole.wait() == 0, whole.stderr

    again = Run(*ARGUMENTS, folder=tmp_path / "killed")
    assert again.wait() == 2
    assert "already holds a run; add --resume" in again.stderr

    (tmp_path / "killed" / "checkpoints" / "step-7").mkdir()  # as a kill in the middle of a save leaves it
    resumed = Run(*ARGUMENTS, "--resume", folder=tmp_path / "killed")
    assert resumed.wait() == 0, resumed.stderr
    assert numbers(resumed) == numbers(whole)
    assert resumed.json("summary.json")["policy_digest"] == whole.json("summary.json")["policy_digest"]
    assert "resumed after step 4" in resumed.stdout
    assert "ignored checkpoints/step-7: it is incomplete" in resumed.stdout
    assert "resuming with another" not in resumed.stdout
    assert not any(row["timing/hidden"] for row in whole.metrics() if "timing/checkpoint" not in row)


def test_sampling_one_step_ahead_is_as_exact_and_hides_what_it_overlaps(tmp_path):
    whole = Run(*ARGUMENTS, *AHEAD, folder=tmp_path / "whole")
    killed = Run(*ARGUMENTS, *AHEAD, folder=tmp_path / "killed")
    killed.until_step(5)
    killed.kill()
    killed.assert_nothing_left()
    assert whole.wait() == 0, whole.stderr
    whole.assert_nothing_left()
    resumed = Run(*ARGUMENTS, *AHEAD, "--resume", folder=tmp_path / "killed")
    assert resumed.wait() == 0, resumed.stderr
    resumed.assert_nothing_left()

    assert numbers(resumed) == numbers(whole)
    assert resumed.json("summary.json")["policy_digest"] == whole.json("summary.json")["policy_digest"]
    rows = whole.metrics()
    assert [row["rollout/staleness_max"] for row in rows] == [0, *[1] * 7]
    assert max(row["push/canary"] for row in rows) < 1e-4
    assert min(row["timing/push_pause"] for row in rows) > 0
    assert min(row["timing/hidden"] for row in rows[:-1]) > 0  # the last step samples nothing
    stages = sum(row.get(f"timing/{name}", 0.0) for row in rows for name in STAGES)
    assert stages - sum(row["timing/hidden"] for row in rows) <= 1.001 * sum(row["timing/step"] for row in rows)
