"""A run has exactly the models that its algorithm needs."""

import asyncio
from pathlib import Path

import pytest

from rl.actors.hosts import Hosts
from rl.algorithms.advantages import GAE
from rl.cli.arguments import find_config
from rl.config import RLConfig, RoleConfig
from rl.host.platform import ALLOCATOR
from rl.session.session import Session


def session_of(config: RLConfig) -> Session:
    async def make() -> Session:
        return Session(config.session(), folder=Path("unused"), hosts=Hosts(Path("unused")))

    return asyncio.run(make())


@pytest.mark.parametrize("roles", [[], ["reference"], ["critic"], ["reference", "critic", "it"]])
def test_run_has_the_models_that_it_needs_and_places_them_as_it_says(roles):
    config = find_config("quickstart")()
    if "reference" in roles:
        config.algorithm.reward_kl_coef = 0.1
    if "critic" in roles:
        config.algorithm.advantage = GAE.Config()
    if "it" in roles:
        teacher = RoleConfig(model=config.model, checkpoint="it", column="teacher_logprobs")
        config.roles["it"] = teacher
    roles = ["trainer", *roles]
    shared = {"none": set(), "models": {*roles}, "all": {*roles, "generator"}}
    for config.colocate, names in shared.items():
        session = session_of(config)
        assert [*session._groups] == roles
        assert session._devices._shared == names
        assert session.pool.meshes[0]._arguments()[-1]["in_turns"] == ("generator" in names)


def test_trainers_alone_have_memory_of_a_gpu_that_grows_in_place(monkeypatch):
    for name in ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    session = session_of(find_config("quickstart")())
    assert session.trainer._environment()["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert "PYTORCH_ALLOC_CONF" not in session.pool.meshes[0]._environment()


def test_learning_rate_schedule_covers_all_optimizer_steps():
    config = find_config("quickstart")()
    config.algorithm.update_epochs = 2
    config.algorithm.prompts_per_minibatch = 8
    config.steps = 5
    assert session_of(config).trainer.engine.steps == 5 * 2 * 4
