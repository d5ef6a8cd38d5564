"""The protocol of trainers: one object for programs, scripts and coroutines."""

import asyncio
from functools import partial
from types import SimpleNamespace

import pytest

from rl.cli import find_config
from rl.errors import ConfigError, Interrupted, RunError
from rl.observe.progress import Progress
from rl.observe.record import RunRecord
from rl.session.session import Session
from rl.step_folders import StepFolders
from rl.trainers.rl import RLTrainer
from rl.trainers.run_folder import RunFolder
from tests.trainers.fakes import Generator, Rewards, Trainer


@pytest.fixture
def make(tmp_path):
    """Makes a trainer of two steps over meshes that compute nothing, with its log of calls."""

    def make(kind=RLTrainer, **fields):
        config = find_config("quickstart")()
        config.steps = 2
        config.rollout.prompts_per_step = 2
        config.rollout.samples_per_prompt = 2
        config.evaluation.prompts = 3
        config.trainer.checkpoint.interval = 1
        config.weights.transport = "shared_memory"
        for name, value in fields.items():
            setattr(config, name, value)
        record = RunRecord(tmp_path / "run")
        log = []
        policy = Trainer(log, StepFolders(record.checkpoints), None)
        meshes = SimpleNamespace(
            models=lambda: {"trainer": policy},
            generator=lambda number: Generator(log, number, policy.slots),
            rewards=lambda task, events: Rewards(),
        )
        run = RunFolder(config, record, Progress(config.steps, quiet=True), command="")
        return kind(
            config, folder=run, make_session=partial(Session.on_nodes, meshes=meshes)
        ), policy

    return make


def test_a_script_trains_evaluates_and_saves_without_an_event_loop(make, tmp_path):
    made, policy = make()
    trainer = made.blocking()
    state = trainer.train()
    assert (state.step, state.version, trainer.step) == (2, 2, 2)
    assert trainer.evaluate()["eval/prompts"] == 3
    trainer.close()
    assert not policy.is_running


def test_a_coroutine_awaits_the_same_verbs(make):
    async def main():
        async with make()[0] as trainer:
            return await trainer.train(), await trainer.evaluate()

    state, scores = asyncio.run(main())
    assert (state.step, scores["eval/prompts"]) == (2, 3)


def test_the_user_measures_evaluations_too(make):
    def longest(groups):
        return {"longest": max(each.sampled_count for group in groups for each in group)}

    with make()[0] as trainer:
        trainer.train()
        scores = trainer.evaluate(metric_calculator=longest)
    assert scores["eval/longest"] >= 1


def test_leaving_raises_and_the_next_call_continues(make):
    class Leaves(RLTrainer):
        leaves_after = 0

        async def after_step(self):
            await super().after_step()
            if self.step == self.leaves_after:
                self.leave()

    with make(Leaves)[0] as trainer:
        trainer.leaves_after = 1
        with pytest.raises(
            Interrupted,
            match=r"after step 1; go on from step 1 with: config\.output_dir = '.*/run'; config",
        ):
            trainer.train()
        assert trainer.train().step == 2


def test_a_config_that_cannot_work_is_refused_before_anything_starts(make):
    with pytest.raises(ConfigError, match="steps is 0; it must be at least 1"):
        make(steps=0)


def test_a_trainer_that_was_not_opened_has_no_model(make):
    with pytest.raises(RunError, match="the trainer is not open; call train or evaluate first"):
        _ = make()[0].model
