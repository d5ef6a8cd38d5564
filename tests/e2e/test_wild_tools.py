"""Tools and workers that misbehave: every episode is accounted for, and no process is left."""

import signal

import pytest

from tests.e2e.pipelines import DEADLINES
from tests.kit.runs import TINY, Run, check_ledger, strike
from tests.kit.tokenizers import make_model
from tests.kit.wild_tools import LOST, NAMES

STEPS = {"lockstep": 12, "two ahead": 12, "asynchronous": 48}
"""Steps of each pipeline. An asynchronous run goes on while a worker hangs."""
GROUPS = 4
PIPELINES = {
    "lockstep": (),
    "two ahead": ("--rollout.max_staleness", "2"),
    "asynchronous": ("--rollout.max_staleness", "2", "--rollout.pipeline", "asynchronous"),
}
BLOWS = [("reward-0", signal.SIGKILL), ("reward-1", signal.SIGSTOP), ("reward-1", signal.SIGKILL)]
WORKER_LOST = {"environment worker died", "environment worker hung"}


@pytest.mark.long
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_every_episode_of_wild_tools_is_accounted_for(tmp_path, pipeline):
    steps = STEPS[pipeline]
    config = ("--config", "tests.e2e.configs.wild_tools", *TINY[2:], "--steps", str(steps))
    model = ("--model.hf_path", str(make_model(tmp_path)), "--task.folder", str(tmp_path))
    evaluation = ("--evaluation.prompts", "0")
    arguments = (*config, *model, *DEADLINES, *PIPELINES[pipeline], *evaluation)
    run = Run(*arguments, folder=tmp_path / "run")
    for step, (worker, blow) in enumerate(BLOWS, 1):
        run.until(lambda step=step: len(run.metrics()) >= 2 * step)
        assert strike(run, worker, blow)
    assert run.wait() == 0, run.stderr
    run.assert_nothing_left()
    forked = (tmp_path / "forked").read_text().splitlines()
    assert len(forked) >= 4
    assert max(map(len, run.stdout.splitlines())) < 2000, "the logs have lines of megabytes"
    reasons = check_ledger(run, steps, GROUPS, bound=0 if pipeline == "lockstep" else 2)
    expected = {tool.__name__: reason for tool, reason in LOST.items()}
    for prompt_id, reason in reasons.items():
        assert reason in {expected.get(NAMES[prompt_id % len(NAMES)]), *WORKER_LOST}
    trained = [prompt for row in run.lines("ledger.jsonl") for prompt in row["trained_now"]]
    assert not [each for each in trained if NAMES[each % len(NAMES)] in expected]
    summary = run.json("summary.json")
    print(summary["lost"], summary["recovered_episodes"], summary["restarts"])
    # A recovery of the whole run takes back the ledger, not these counts.
    assert sum(summary["lost"].values()) >= len(reasons)
    assert sum(summary["recovered_episodes"].values()) > 0
    assert summary["recovered_episodes"].keys() == {"begun again"}
    for rollout in run.rollouts():
        # A malformed call is a turn that the environment does not see.
        assert 2 <= rollout["metrics"]["turns"] <= 3
        assert rollout["stop_reason"] in ("done", "turns")
