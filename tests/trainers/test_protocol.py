"""Protocol of trainers: one object for programs, scripts and coroutines."""

import asyncio

import pytest

from rl.errors import Interrupted, RunError
from rl.trainers.rl import RLTrainer
from tests.trainers.loops import evaluating


class Leaves(RLTrainer):
    leaves_after = 0

    async def after_step(self):
        await super().after_step()
        if self.step == self.leaves_after:
            self.leave()


def longest(groups):
    return {"longest": max(each.sampled_count for group in groups for each in group)}


def test_a_script_trains_leaves_goes_on_and_evaluates_without_an_event_loop(run):
    options = {"steps": 2, "save_every": 1, "command": "", "fields": evaluating(every=0)}
    made = run.make(kind=Leaves, **options)
    with pytest.raises(RunError, match="the trainer is not open; call train or evaluate first"):
        _ = made.model
    with made as trainer:
        trainer.leaves_after = 1
        said = r"after step 1; go on from step 1 with: config\.output_dir = '.*/run'; config"
        with pytest.raises(Interrupted, match=said):
            trainer.train()
        state = trainer.train()
        assert (state.step, state.version, trainer.step) == (2, 2, 2)
        scores = trainer.evaluate(metric_calculator=longest)
    assert scores["eval/prompts"] == 3
    assert scores["eval/longest"] >= 1
    assert not run.trainer.is_running


def test_a_coroutine_awaits_the_same_verbs(run):
    async def main():
        async with run.make(steps=2, fields=evaluating(every=0)) as trainer:
            return await trainer.train(), await trainer.evaluate()

    state, scores = asyncio.run(main())
    assert (state.step, scores["eval/prompts"]) == (2, 3)
