"""Evaluation of the initial weights before the first step, of every kind of run."""

import asyncio
from collections import Counter
from contextlib import nullcontext
from typing import ClassVar

import pytest

from rl.cli import find_config
from rl.config import SampledEvaluationConfig
from rl.errors import Interrupted
from rl.tasks.gsm8k_jsonl import Gsm8kJsonl
from rl.trainers.preference import PreferenceTrainer
from rl.trainers.sft import SFTTrainer
from tests.trainers.loops import calls, without_times
from tests.trainers.test_loop_evaluation import BOTH, deterministic, evaluating, while_evaluating
from tests.trainers.tiny_chat import chat_rows, preference_rows


def at_start(edit, every=2):
    """``edit``, with an evaluation of three prompts at the start and after ``every`` steps."""
    return evaluating(edit, every=every, at_start=True)


def begun(run) -> list[str]:
    """Return the ids of the first requests of the calls that the initial weights answer."""
    by_version = zip(calls(run.log, "generate"), run.generators[0].calls, strict=True)
    return [requests[0] for entry, (requests, _) in by_version if entry == "generate 0"]


@BOTH
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("every", [0, 2])
def test_the_initial_weights_are_evaluated_before_the_first_step(run, edit, staleness, every):
    run(steps=4, staleness=staleness, edit=at_start(edit, every))
    first, *others = run.record.read_evaluations()
    assert (first["step"], first["eval/version_min"], first["eval/version_max"]) == (0, 0, 0)
    assert first["eval/skipped"] == 0
    assert [row["step"] for row in others if row["step"] < 2] == []
    assert bool(others) == (every > 0)
    assert run.summary.get("eval/skipped", 0) == 0
    is_evaluation = [name.startswith("eval/") for name in begun(run)]
    assert is_evaluation == sorted(is_evaluation, reverse=True)
    assert is_evaluation[0]
    assert run.record.evaluated.path(0).exists()


def killed(run, trainer, generator):
    async def kill(version):
        if version == 0:
            raise ZeroDivisionError("killed")

    while_evaluating(generator, kill)


def killed_in_the_first_step(run, trainer, generator):
    async def kill():
        raise ZeroDivisionError("killed")

    trainer.during["forward_backward"] = kill


def left(run, trainer, generator):
    async def leave(version):
        run.loop.leave()
        await asyncio.sleep(60)

    while_evaluating(generator, leave)


def lost(run, trainer, generator):
    async def lose(version):
        if trainer.starts == 1:
            trainer.lose()
            await asyncio.sleep(60)

    while_evaluating(generator, lose)


@BOTH
@pytest.mark.parametrize("disturb", [killed, killed_in_the_first_step, left, lost])
def test_a_disturbed_run_evaluates_the_initial_weights_once(run, edit, disturb):
    run(steps=3, edit=at_start(edit), folder="whole")
    evaluated = run.record.read_evaluations()
    whole = without_times(run.record.read_metrics())

    def prepare(trainer, generator):
        disturb(run, trainer, generator)

    is_written = disturb is killed_in_the_first_step
    is_killed = is_written or disturb is killed
    with pytest.raises(ZeroDivisionError) if is_killed else nullcontext():
        run(prepare, steps=3, edit=at_start(edit))
    if disturb is not lost:
        assert [row["step"] for row in run.record.read_evaluations()] == [0] * is_written
        run(steps=3, edit=at_start(edit), saved=run.saved)
        assert any(name.startswith("eval/") for name in begun(run)) != is_written
    first = [row for row in run.record.read_evaluations() if row["step"] == 0]
    assert first == evaluated[:1]
    if edit is deterministic:
        assert run.record.read_evaluations() == evaluated
        assert without_times(run.record.read_metrics()) == whole


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
    make_preference, name, kind, rows
):
    config = make_preference(name, validate_at_start=True, steps=2)
    disturbed = once_left_and_once_failing(kind)
    with disturbed(config, rows) as trainer:
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


def test_validation_and_sampled_evaluation_begin_each_by_a_field_of_its_own(
    make_preference, chat_model
):
    task = Gsm8kJsonl.Config(path=str(chat_model.parent / "problems.jsonl"), max_prompt_tokens=96)
    for own, sampled in ((False, False), (False, True), (True, False), (True, True)):
        config = make_preference("sft_jsonl", validate_at_start=own)
        config.evaluation = SampledEvaluationConfig(
            task=task, max_tokens=4, prompts=3, at_start=sampled
        )
        trainer = SFTTrainer(config, chat_rows(10))
        wanted = [trainer.validation_scores] * own + [trainer.sampled_scores] * sampled
        assert trainer.due() == wanted


def test_by_default_no_run_evaluates_its_initial_weights(run):
    run(steps=2, edit=evaluating(deterministic, every=1))
    assert [row["step"] for row in run.record.read_evaluations()] == [1]
    assert not find_config("sft_jsonl")().validate_at_start
