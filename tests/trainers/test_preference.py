"""Preference training on real engines and a tiny model."""

import math
import re

import pytest

from rl.algorithms.sequence_losses import IPOLoss, KTOLoss, SimPOLoss
from rl.trainers.preference import PreferenceTrainer
from tests.kit.chats import labelled_rows, preference_rows
from tests.kit.pages import undocumented
from tests.kit.tables import long

LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("fields", "rows", "begins"),
    [
        pytest.param({"steps": 8}, preference_rows(40), math.log(2), id="dpo"),
        pytest.param({"loss": KTOLoss.Config()}, labelled_rows(30), 0.5, id="kto"),
        long({"loss": IPOLoss.Config()}, preference_rows(30), None, id="ipo"),
        long({"loss": SimPOLoss.Config()}, preference_rows(30), None, id="simpo"),
    ],
)
def test_a_loss_begins_where_policy_and_reference_are_equal_and_learns(
    examples_config, fields, rows, begins
):
    with PreferenceTrainer(examples_config(**fields), rows) as trainer:
        state = trainer.train()
    steps = trainer.run.record.read_metrics()
    assert not undocumented({name for row in steps for name in row})
    first, *_, last = steps
    assert last["loss/mean"] < first["loss/mean"]
    if begins is not None:
        assert first["loss/mean"] == pytest.approx(begins, abs=1e-6)
        assert "eval/rewards/accuracy" in state.metrics
    if "loss" not in fields:  # that of DPO
        assert state.metrics["eval/loss"] < begins
        assert last["rewards/margin"] > 0


def with_margins(*margins):
    rows = zip(preference_rows(len(margins)), margins, strict=True)
    return [row | {"margin": margin} for row, margin in rows]


def test_a_reward_model_learns_the_margins_of_its_rows(examples_config):
    config = examples_config("reward_model_jsonl", **{"task.held_out_fraction": 0.0})
    config.loss.margin = 0.25
    trainer = PreferenceTrainer(config, with_margins(1, None, 3.5))
    _, labels = trainer.batch_of(trainer.dataset_train)
    assert labels.margins.tolist() == [1.0, 0.25, 3.5]
    assert trainer.warnings() == []
    without = PreferenceTrainer(config, with_margins(None, None))
    assert without.batch_of(without.dataset_train)[1].margins is None


def test_margins_that_a_loss_does_not_read_are_said(examples_config):
    trainer = PreferenceTrainer(examples_config(), with_margins(*range(9)))
    assert trainer.warnings() == ["DPOLoss does not read the margins of the rows"]


@pytest.mark.parametrize(
    ("good", "bad", "weights", "said"),
    [
        (6, 6, {}, []),
        (8, 6, {}, []),
        (9, 3, {}, ["9 answers are good and 3 are bad, .* loss.desirable_weight to 3$"]),
        (9, 3, {"undesirable_weight": 3.0}, []),
        (2, 8, {"desirable_weight": 2.0}, ["2 answers are good and 8 are bad, .* to 0.25$"]),
        (4, 0, {}, ["4 answers are good and 0 are bad, .* add answers of the other kind$"]),
    ],
)
def test_kto_says_that_good_and_bad_answers_weigh_differently(
    examples_config, good, bad, weights, said
):
    rows = labelled_rows(9)
    chosen = [row for row in rows if row["label"]][:good]
    chosen += [row for row in rows if not row["label"]][:bad]
    config = examples_config(loss=KTOLoss.Config(**weights), **{"task.held_out_fraction": 0.0})
    warnings = PreferenceTrainer(config, chosen).warnings()
    assert len(warnings) == len(said)
    assert all(map(re.search, said, warnings))


def test_labelled_answers_of_one_prompt_are_held_out_together(examples_config):
    config = examples_config(loss=KTOLoss.Config(), **{"task.held_out_fraction": 0.4})
    trainer = PreferenceTrainer(config, labelled_rows(30))
    keys = [{*map(trainer.key, side)} for side in (trainer.dataset_train, trainer.dataset_eval)]
    assert len(keys[0] | keys[1]) == 30
    assert keys[1] and not keys[0] & keys[1]
