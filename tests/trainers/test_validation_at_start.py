"""Validation of the initial weights, in runs on given examples."""

import asyncio
from collections import Counter
from typing import ClassVar

import pytest

from rl.cli.arguments import find_config
from rl.config import SampledEvaluationConfig
from rl.errors import Interrupted
from rl.tasks.gsm8k_jsonl import Gsm8kJsonl
from rl.trainers.preference import PreferenceTrainer
from rl.trainers.sft import SFTTrainer
from tests.kit.chats import chat_rows, preference_rows


def once_left_and_once_failing(base):
    """Return a subclass that is left in its first evaluation, and whose first step fails."""

    class Disturbed(base):
        evaluated: ClassVar = Counter()  # by step
        has_failed = False

        async def scores(self, *options):
            self.evaluated[self.step] += 1
            if self.evaluated.total() == 1:
                self.leave()
                await asyncio.sleep(60)
            return await super().scores(*options)

        def due(self):  # that of SFT asks for its parts
            return [self.scores] if super().due() else []

        async def train_step(self):
            if not self.has_failed and not self.leaving:
                self.has_failed = True
                raise ZeroDivisionError("the first step")
            return await super().train_step()

    return Disturbed


@pytest.mark.parametrize(
    ("name", "kind", "rows"),
    [
        ("sft_jsonl", SFTTrainer, chat_rows(40)),
        ("dpo_jsonl", PreferenceTrainer, preference_rows(40)),
    ],
    ids=["sft", "dpo"],
)
def test_the_initial_weights_are_validated_once_although_the_run_is_left_and_fails(
    examples_config, name, kind, rows
):
    config = examples_config(name, validate_at_start=True, steps=2)
    with once_left_and_once_failing(kind)(config, rows) as trainer:
        with pytest.raises(Interrupted):
            trainer.train()
        assert trainer.run.record.read_evaluations() == []
        with pytest.raises(ZeroDivisionError, match="the first step"):
            trainer.train()
        first = trainer.run.record.read_evaluations()
        state = trainer.train()
        assert trainer.run.record.read_evaluations() == first
    assert trainer.evaluated == {0: 2, 2: 1}
    assert [row["step"] for row in first] == [0]
    assert first[0]["eval/loss"] > state.metrics["eval/loss"]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("sampled", [False, True])
def test_validation_and_sampled_evaluation_begin_each_by_a_field_of_its_own(
    examples_config, chat_model, own, sampled
):
    task = Gsm8kJsonl.Config(path=str(chat_model.parent / "problems.jsonl"), max_prompt_tokens=96)
    config = examples_config("sft_jsonl", validate_at_start=own)
    config.evaluation = SampledEvaluationConfig(
        task=task, max_tokens=4, prompts=3, at_start=sampled
    )
    trainer = SFTTrainer(config, chat_rows(10))
    assert trainer.due() == [trainer.validation_scores] * own + [trainer.sampled_scores] * sampled
    assert not find_config("sft_jsonl")().validate_at_start
