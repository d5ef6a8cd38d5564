"""Algorithms that take more than one model, or more than one update a step, on real engines."""

import signal

import pytest

from tests.e2e.pipelines import COMMON
from tests.e2e.runs import Run, digest, numbers

STEPS = 5
UPDATES = 4
MANY_MODELS = ("--config", "tests.e2e.configs.many_models", *COMMON[2:], "--steps", str(STEPS))


@pytest.mark.parametrize(
    "kills",
    [(), pytest.param(((2, "reference"), (4, "critic")), marks=pytest.mark.long)],
    ids=["quiet", "kills"],
)
def test_neither_shared_devices_nor_lost_models_change_a_number(tmp_path, finished, kills):
    whole = finished(*MANY_MODELS)
    rows = whole.metrics()
    assert [row["policy_version"] for row in rows] == [
        UPDATES * step for step in range(1, STEPS + 1)
    ]
    drift = [row["kl/reference"] for row in rows]
    assert drift[0] == drift[2] == drift[4] == 0.0  # it is then what the policy is
    assert min(drift[1], drift[3]) > 1e-4
    assert all(row["critic/grad_norm"] > 0 for row in rows)

    run = Run(*MANY_MODELS, "--colocate", "all", folder=tmp_path / "run")
    for step, model in kills:
        run.until(lambda step=step: len(run.metrics()) >= step and "push over" in run.stdout)
        run.strike(model, signal.SIGKILL)
        run.until(lambda model=model: f"warning: {model} rank 0, " in run.stdout)
    assert run.wait() == 0, run.stderr
    run.assert_nothing_left()
    assert run.json("summary.json")["restarts"] == len(kills)
    assert numbers(run, "push/") == numbers(whole, "push/")
    assert digest(run) == digest(whole)


def test_an_algorithm_of_the_users_own_learns(tmp_path):
    config = "tests.trainers.rejection_sampling.rejection_sampling"
    quick = ("--evaluation.prompts", "8", "--generator.kv_cache_gib", "0.05")
    run = Run("--config", config, "--steps", "30", *quick, folder=tmp_path / "run")
    assert run.wait() == 0, run.stderr
    rewards = [row["reward/mean"] for row in run.metrics()]
    kept = [row["rejection/kept"] for row in run.metrics()]
    assert sum(rewards[-5:]) > 1.5 * sum(rewards[:5])
    assert all(0 < share < 1 for share in kept)
    refused = Run("--config", config, "--algorithm.margin", "-1", folder=tmp_path / "refused")
    assert refused.wait() == 2
    assert "algorithm.margin is -1.0; it must be" in refused.stderr
