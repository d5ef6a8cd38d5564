"""A run is a function of its config, also when it is killed on the way (C6)."""

from tests.e2e.runs import TINY, Run

ARGUMENTS = [*TINY, "--steps", "8", "--trainer.checkpoint.interval", "2"]


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
