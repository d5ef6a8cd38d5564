"""Preference training on real engines and a tiny model."""

import math

import pytest

from rl.algorithms.sequence_losses import IPOLoss, KTOLoss, SimPOLoss
from rl.trainers.preference import PreferenceTrainer
from tests.metric_names import undocumented
from tests.trainers.tiny_chat import labelled_rows, preference_rows


def rows_of(trainer):
    rows = trainer.record.read_metrics()
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
