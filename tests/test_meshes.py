"""Which models a run has: those that its algorithm needs, and no other."""

import asyncio
from pathlib import Path

import pytest

from rl.actors.hosts import Hosts
from rl.algorithms.advantages import GAE
from rl.cli import find_config
from rl.config import RLConfig, RoleConfig
from rl.meshes import Meshes


def meshes_of(config: RLConfig) -> Meshes:
    async def make() -> Meshes:
        return Meshes(config, Hosts(Path("unused")), Path("unused"), print)

    return asyncio.run(make())


def needs_reference(config: RLConfig) -> None:
    config.algorithm.reward_kl_coef = 0.1


def needs_critic(config: RLConfig) -> None:
    config.algorithm.advantage = GAE.Config()


def needs_teacher(config: RLConfig) -> None:
    config.roles["teacher"] = RoleConfig(
        model=config.model, checkpoint="it", column="teacher_logprobs"
    )


@pytest.mark.parametrize(
    ("edits", "roles"),
    [
        ((), ["policy"]),
        ((needs_reference,), ["policy", "reference"]),
        ((needs_critic,), ["policy", "critic"]),
        (
            (needs_teacher, needs_critic, needs_reference),
            ["policy", "reference", "critic", "teacher"],
        ),
    ],
)
def test_a_run_has_the_models_that_it_needs(edits, roles):
    config = find_config("quickstart")()
    for edit in edits:
        edit(config)
    meshes = meshes_of(config)
    assert list(meshes.models) == roles
    assert meshes.shared == []
    config.colocate = "models"
    assert meshes_of(config).shared == roles
    config.colocate = "all"
    assert meshes_of(config).shared == [*roles, "generator"]


def test_the_learning_rates_schedule_is_over_all_optimizer_steps():
    config = find_config("quickstart")()
    config.algorithm.update_epochs = 2
    config.algorithm.prompts_per_minibatch = 8
    config.steps = 5
    assert meshes_of(config).models["policy"]._steps == 5 * 2 * 4
