"""Generators are replicas: more of them learn the same, and they come and go while the run goes on."""

import signal

from tests.e2e.runs import QUICKSTART, Run


def late_reward(run: Run) -> float:
    rewards = [row["reward/mean"] for row in run.metrics()]
    return sum(rewards[-10:]) / 10


def test_two_replicas_learn_what_one_does_while_one_is_killed_one_joins_and_one_leaves(tmp_path, finished):
    arguments = ["--generator.replicas", "2", "--rollout.max_staleness", "1", "--rollout.pipeline", "asynchronous"]
    run = Run(*QUICKSTART, *arguments, folder=tmp_path / "run")
    run.until_step(5)
    assert run.strike("generator-1", signal.SIGKILL)
    run.until_said("warning: generator-1 rank 0, ")
    (run.folder / "replicas").write_text("3")
    run.until_said("generator-2 has joined")
    run.until_said("generator-1 has joined")
    step = len(run.metrics())
    run.until_step(step + 5)
    (run.folder / "replicas").write_text("1")
    run.until_said("generator-1 leaves")
    assert run.wait() == 0, run.stderr
    run.assert_nothing_left()
    assert run.json("summary.json")["restarts"] == run.metrics()[-1]["restarts/generators"] == 1
    assert step > 5, "training stood still while a generator was away"
    assert max(row["rollout/staleness_max"] for row in run.metrics()) == 1
    assert abs(late_reward(run) - late_reward(finished(*QUICKSTART))) < 0.15
