"""Preference training on real engines and a tiny model."""

import math
import re

import pytest

from rl.algorithms.sequence_losses import IPOLoss, KTOLoss, SimPOLoss
from rl.trainers.preference import PreferenceTrainer
from tests.metric_names import undocumented
from tests.trainers.tiny_chat import labelled_rows, preference_rows


def rows_of(trainer):
    rows = trainer.run.record.read_metrics()
    assert not undocumented({name for row in rows for name in row})
    return rows


def test_dpo_begins_at_ln_2_and_learns_the_preference(make_preference):
    with PreferenceTrainer(make_preference(steps=8), preference_rows(40)) as trainer:
        state = trainer.train()
        first, *_, last = rows_of(trainer)
        assert trainer.evaluate()["eval/loss"] == pytest.approx(state.metrics["eval/loss"])
    assert first["loss/mean"] == pytest.approx(math.log(2), abs=1e-6)
    assert last["loss/mean"] < first["loss/mean"]
    assert state.metrics["eval/loss"] < math.log(2)
    assert last["rewards/margin"] > 0


@pytest.mark.long
@pytest.mark.parametrize("loss", [IPOLoss.Config(), SimPOLoss.Config()], ids=["ipo", "simpo"])
def test_losses_of_pairs_learn(make_preference, loss):
    with PreferenceTrainer(make_preference(loss=loss), preference_rows(30)) as trainer:
        trainer.train()
        first, *_, last = rows_of(trainer)
    assert last["loss/mean"] < first["loss/mean"]


def test_kto_learns_from_single_answers(make_preference):
    with PreferenceTrainer(make_preference(loss=KTOLoss.Config()), labelled_rows(30)) as trainer:
        state = trainer.train()
        first, *_, last = rows_of(trainer)
    assert first["loss/mean"] == pytest.approx(0.5, abs=1e-6)
    assert last["loss/mean"] < first["loss/mean"]
    assert "eval/rewards/accuracy" in state.metrics


def with_margins(*margins):
    return [
        row | {"margin": margin}
        for row, margin in zip(preference_rows(len(margins)), margins, strict=True)
    ]


def test_a_reward_model_learns_the_margins_of_its_rows(make_preference):
    config = make_preference("reward_model_jsonl")
    config.task.held_out_fraction = 0.0
    config.loss.margin = 0.25
    trainer = PreferenceTrainer(config, with_margins(1, None, 3.5))
    _, labels = trainer.batch_of(trainer.dataset_train)
    assert labels.margins.tolist() == [1.0, 0.25, 3.5]
    assert trainer.warnings() == []
    without = PreferenceTrainer(config, with_margins(None, None))
    assert without.batch_of(without.dataset_train)[1].margins is None


def test_margins_that_a_loss_does_not_read_are_said(make_preference):
    trainer = PreferenceTrainer(make_preference(), with_margins(*range(9)))
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
    make_preference, good, bad, weights, said
):
    rows = labelled_rows(9)
    chosen = [row for row in rows if row["label"]][:good]
    chosen += [row for row in rows if not row["label"]][:bad]
    config = make_preference(loss=KTOLoss.Config(**weights))
    config.task.held_out_fraction = 0.0
    warnings = PreferenceTrainer(config, chosen).warnings()
    assert len(warnings) == len(said)
    assert all(map(re.search, said, warnings))
