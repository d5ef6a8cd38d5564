"""Algorithms that take more than one model, or more than one update a step, on real engines."""

import signal

import pytest

from rl.train import main
from tests.e2e.runs import TINY, Run, digest, numbers

STEPS = 4
UPDATES = 4
MANY_MODELS = (
    *("--config", "tests.e2e.configs.many_models", *TINY[2:], "--steps", str(STEPS)),
    *("--trainer.checkpoint.interval", "2", "--evaluation.every", "2", "--evaluation.at_start"),
    *("--evaluation.prompts", "64", "--evaluation.samples", "2"),
    *("--trainer.optimizer.param_groups.0.optimizer_kwargs.lr", "0.01"),
    *("--trainer.lr_scheduler.warmup_steps", "0"),  # so that each step changes the scores
    "trainer.lora:on",
)
"""Arguments of a run of a policy with an adapter, a critic and a reference, with several updates a
step.
"""
OF_ONE_OWN = ("--config", "tests.trainers.rejection_sampling.rejection_sampling")


@pytest.mark.parametrize(
    "kills",
    [(), pytest.param(((1, "reference"), (3, "critic")), marks=pytest.mark.long)],
    ids=["quiet", "kills"],
)
def test_neither_shared_devices_nor_lost_models_change_a_number(tmp_path, finished, kills):
    whole = finished(*MANY_MODELS)
    rows = whole.metrics()
    assert [row["policy_version"] for row in rows] == [
        UPDATES * step for step in range(1, STEPS + 1)
    ]
    drift = [row["kl/reference"] for row in rows]
    assert drift[0] == drift[2] == 0.0  # it is then what the policy is
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


@pytest.mark.long
def test_an_algorithm_of_the_users_own_learns(tmp_path):
    quick = ("--evaluation.prompts", "8", "--generator.kv_cache_gib", "0.05")
    run = Run(*OF_ONE_OWN, "--steps", "30", *quick, folder=tmp_path / "run")
    assert run.wait() == 0, run.stderr
    rewards = [row["reward/mean"] for row in run.metrics()]
    kept = [row["rejection/kept"] for row in run.metrics()]
    assert sum(rewards[-5:]) > 1.5 * sum(rewards[:5])
    assert all(0 < share < 1 for share in kept)


def test_a_field_of_the_users_own_algorithm_is_refused_by_its_rule(tmp_path, capsys):
    folder = ("--output-dir", str(tmp_path / "run"))
    assert main([*OF_ONE_OWN, "--algorithm.margin", "-1", *folder]) == 2
    assert "algorithm.margin is -1.0; it must be" in capsys.readouterr().err
