"""Algorithms that take more than one model, or more than one update a step, on real engines."""

import signal

import pytest

from rl.train import main
from tests.e2e.pipelines import LONG, MANY_MODELS
from tests.kit.runs import Run, digest, numbers, strike, words

OF_ONE_OWN = ("--config", "tests.trainers.rejection_sampling.rejection_sampling")


@LONG
@pytest.mark.parametrize("kills", [(), ((1, "reference"), (3, "critic"))], ids=["quiet", "kills"])
def test_neither_shared_devices_nor_lost_models_change_a_number(tmp_path, recorded, kills):
    whole = recorded()
    rows = whole.metrics()
    assert [row["policy_version"] for row in rows] == [4, 8, 12, 16]
    drift = [row["kl/reference"] for row in rows]
    assert drift[0] == drift[2] == 0.0  # it is then what the policy is
    assert min(drift[1], drift[3]) > 1e-4
    assert all(row["critic/grad_norm"] > 0 for row in rows)

    run = Run(*MANY_MODELS, "--colocate", "all", folder=tmp_path / "run")
    for step, model in kills:
        run.until(lambda step=step: len(run.metrics()) >= step and "push over" in run.stdout)
        assert strike(run, model, signal.SIGKILL)
    assert run.wait() == 0, run.stderr
    run.assert_nothing_left()
    assert run.json("summary.json")["restarts"] == len(kills)
    assert numbers(run, "push/") == numbers(whole, "push/")
    assert digest(run) == digest(whole)


@LONG
def test_an_algorithm_of_the_users_own_learns(tmp_path):
    quick = words("--steps 30 --evaluation.prompts 8 --generator.kv_cache_gib 0.05")
    run = Run(*OF_ONE_OWN, *quick, folder=tmp_path / "run")
    assert run.wait() == 0, run.stderr
    rewards = [row["reward/mean"] for row in run.metrics()]
    kept = [row["rejection/kept"] for row in run.metrics()]
    assert sum(rewards[-5:]) > 1.5 * sum(rewards[:5])
    assert all(0 < share < 1 for share in kept)


def test_a_field_of_the_users_own_algorithm_is_refused_by_its_rule(tmp_path, capsys):
    folder = ("--output-dir", str(tmp_path / "run"))
    assert main([*OF_ONE_OWN, "--algorithm.margin", "-1", *folder]) == 2
    assert "algorithm.margin is -1.0; it must be" in capsys.readouterr().err
