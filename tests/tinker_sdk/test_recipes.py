"""Unmodified recipes of the cookbook run to their end against a server of a tiny model."""

import os

import pytest

from tests.kit.tables import cases

RECIPES = (
    *("arithmetic", "chat_sl", "distillation", "dpo", "gsm8k", "guess_number", "multi_teacher"),
    *("sdft", "shorter", "twenty_questions"),
)
IN_CI = ("arithmetic", "chat_sl")
"""Recipes that run for each change, if the SDK can be installed."""
SHORT = IN_CI if os.environ.get("CI") else ()


def test_every_recipe_of_the_script_is_run(recipes):
    assert {*RECIPES} == recipes.RECIPES.keys() - {"sl_loop", "chain"}


@pytest.mark.parametrize("name", cases(RECIPES, SHORT))
def test_a_recipe_runs_to_its_end(recipes, sdk, served, name):
    assert recipes.play([name], sdk, served.folder, served.url, [])
    assert len(recipes.metrics_of(served.folder, name)) >= 2


@pytest.mark.long
def test_supervised_training_lowers_the_loss_and_reinforcement_learning_raises_the_reward(
    recipes, sdk, served
):
    """sl_loop learns to answer 4 or 7; rl_loop goes on from its checkpoint, where 4 is right."""
    assert recipes.play(["chain"], sdk, served.folder, served.url, [])
    rows = recipes.metrics_of(served.folder, "chain")
    losses = [row["train_mean_nll"] for row in rows if "train_mean_nll" in row]
    assert len(losses) == 320
    assert losses[-1] < 0.05 * losses[0]
    rewards = [row["reward/total"] for row in rows if "reward/total" in row]
    assert len(rewards) == 30
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2
