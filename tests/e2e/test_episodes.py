"""Episodes of several turns with the real engines: exact log-probs, and exact resume."""

import signal

import numpy as np
import pytest

from tests import warm
from tests.e2e.configs import BLOCK
from tests.e2e.held import Hold
from tests.kit.runs import TINY, Run, assert_same
from tests.kit.tokenizers import make_model

EPISODES = ("--config", "tests.e2e.configs.guessing", *TINY[2:])


@pytest.fixture(scope="module")
def arguments(tmp_path_factory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("model")
    hold = ("--task.folder", str(folder))
    return (*EPISODES, "--model.hf_path", str(make_model(folder)), *hold)


@pytest.mark.long
def test_log_probs_of_all_turns_are_those_of_the_trainer(arguments, finished):
    """Later turns are sampled on cached blocks, after every change of the weights."""
    run = finished(*arguments)
    rows = run.metrics()
    assert len(rows) == 6
    assert max(row["logprob/error_max"] for row in rows) <= 1e-5
    assert rows[-1]["policy_version"] == 6
    rollouts = run.rollouts()
    assert len(rollouts) == 6 * 16
    sequences = [sequence for rollout in rollouts for sequence in rollout["sequences"]]
    assert max(len(sequence["tokens"]) for sequence in sequences) > 4 * BLOCK
    assert {rollout["stop_reason"] for rollout in rollouts} <= {"done", "turns", "length"}
    assert max(rollout["metrics"]["turns"] for rollout in rollouts) > 2
    masks = [sequence["mask_sizes"] for sequence in sequences]
    for sequence, sizes in zip(sequences, masks, strict=True):
        assert len(sizes) == len(sequence["tokens"])
        assert not np.array(sizes)[~np.array(sequence["sampled"])].any()
    assert np.concatenate(masks).any()  # top-p cut


@pytest.mark.long
def test_a_run_that_is_killed_inside_a_step_of_an_episode_resumes_as_the_uninterrupted_one(
    arguments, finished, tmp_path
):
    """Its environment worker is killed inside a step later, and its episodes are replayed."""
    whole = finished(*arguments)
    hold = Hold(arguments[-1])
    run = Run(*arguments, folder=tmp_path / "run")
    run.until_step(3)
    hold.begin()
    run.until(lambda: hold.has_caught)
    run.kill()
    hold.end()
    run.assert_nothing_left()
    run = Run(*arguments, "--resume", folder=tmp_path / "run")
    run.until_said("resumed after step ")  # the constructor has played its episode
    hold.begin()
    run.until(lambda: hold.has_caught)
    assert run.strike("reward-0", signal.SIGKILL)
    hold.end()
    assert run.wait() == 0, run.stderr
    run.assert_nothing_left()
    assert run.json("summary.json")["recovered_episodes"].keys() == {"replayed"}
    assert_same(run, whole)


@pytest.mark.long
def test_the_policy_of_a_run_plays_an_episode(arguments, finished):
    run = finished(*arguments)
    done = warm.run("rl.play", "--run", run.folder, "--prompt", "1", timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("starting trainer (1 rank), 1 x generator (1 rank)") == 1
    assert done.stdout.count("[fed: ") == done.stdout.count("[sampled: ") > 1
    assert "turns: reward 0, not correct" in done.stdout or "done: reward" in done.stdout
