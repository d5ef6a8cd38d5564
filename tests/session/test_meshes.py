"""A run has exactly the models that its algorithm needs."""

import asyncio
from pathlib import Path

import pytest

from rl.actors.hosts import Hosts
from rl.algorithms.advantages import GAE
from rl.cli import find_config
from rl.config import RLConfig, RoleConfig
from rl.session.session import Session


def session_of(config: RLConfig) -> Session:
    async def make() -> Session:
        return Session(config.session(), folder=Path("unused"), hosts=Hosts(Path("unused")))

    return asyncio.run(make())


def shared(config: RLConfig) -> set[str]:
    return {*session_of(config)._residency._shared}


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
        ((), ["trainer"]),
        ((needs_reference,), ["trainer", "reference"]),
        ((needs_critic,), ["trainer", "critic"]),
        (
            (needs_teacher, needs_critic, needs_reference),
            ["trainer", "reference", "critic", "teacher"],
        ),
    ],
)
def test_run_has_the_models_that_it_needs(edits, roles):
    config = find_config("quickstart")()
    for edit in edits:
        edit(config)
    assert list(session_of(config)._groups) == roles
    assert shared(config) == set()
    config.colocate = "models"
    assert shared(config) == {*roles}
    config.colocate = "all"
    assert shared(config) == {*roles, "generator"}


def test_learning_rate_schedule_covers_all_optimizer_steps():
    config = find_config("quickstart")()
    config.algorithm.update_epochs = 2
    config.algorithm.prompts_per_minibatch = 8
    config.steps = 5
    assert session_of(config).trainer.steps == 5 * 2 * 4
