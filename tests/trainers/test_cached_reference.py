"""Scores of the reference, computed once and kept in the run folder."""

import os
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch

from rl.algorithms.sequence_losses import KTOLoss, SimPOLoss
from rl.errors import ConfigError, Interrupted, RunError
from rl.trainers import reference_scores
from rl.trainers.preference import PreferenceTrainer
from rl.trainers.reference_scores import ReferenceScores, data_digest, source_digest
from tests.kit.chats import labelled_rows, preference_rows
from tests.kit.tables import long

HELD_OUT = preference_rows(23)[20:]
CACHED = {"reference.scores": "cached"}


class Counting(PreferenceTrainer):
    """Counts the batches that the reference scores, and leaves after ``limit`` of them."""

    limit = 1000
    batches = 0

    async def scores_of(self, batch, role):
        self.batches += role == "reference"
        if role == "reference" and self.batches == self.limit:
            self.leave()
        return await super().scores_of(batch, role)

    async def train_step(self):
        if self.cache is not None:
            assert not self.session._groups["reference"].is_running
        return await super().train_step()


def metrics_of(trainer):
    """Return the metrics of the loss, step by step."""
    names = ("loss", "rewards", "logps", "kl", "trainer/grad_norm")
    rows = trainer.run.record.read_metrics()
    return [{name: row[name] for name in row if name.startswith(names)} for row in rows]


@pytest.fixture
def train(examples_config):
    """Function that trains; returns the trainer and its final metrics."""

    def train(rows, held_out=HELD_OUT, **fields):
        with Counting(examples_config(**fields), rows, held_out) as trainer:
            results = trainer.train().metrics
        return trainer, results

    return train


@pytest.mark.parametrize(
    ("rows", "held_out", "fields"),
    [
        (preference_rows(14), HELD_OUT, {}),
        long(labelled_rows(6), labelled_rows(3), {"loss": KTOLoss.Config()}),
        long("pairs.parquet", HELD_OUT, {}),
    ],
    ids=["dpo", "kto", "table"],
)
def test_scores_that_were_computed_once_give_the_loss_of_those_of_each_step(
    train, examples_config, dataset_cache, monkeypatch, tmp_path, rows, held_out, fields
):
    """The 16 examples are more than an epoch. The cached run is left at once and goes on."""
    is_table = isinstance(rows, str)
    if is_table:
        rows = str(tmp_path / rows)
        parquet.write_table(pa.Table.from_pylist(preference_rows(14)), rows)
    computed, wanted = train(rows, held_out, output_dir=str(tmp_path / "computed"), **fields)
    monkeypatch.setattr(reference_scores, "EVERY_S", 0.0)
    config = examples_config(**CACHED, **fields)
    with Counting(config, rows, held_out) as left, pytest.raises(Interrupted):
        left.limit = 3
        left.train()
    assert (left.step, left.batches) == (0, 3)
    fields = CACHED | fields | {"resume": True}
    cached, results = train(rows, held_out, **fields)
    held_out_batches = -(-len(held_out) // 4)
    assert cached.batches == held_out_batches + 4 - 3
    assert cached.batches + left.batches <= computed.batches
    entries = 16 if cached.is_unpaired else 14
    assert f"reference, train: {entries} of {entries}" in cached.run.record.run_log.read_text()
    first, *later = zip(metrics_of(cached), metrics_of(computed), strict=True)
    assert first[0] == first[1]  # the same bits
    for own, other in later:
        assert own == pytest.approx(other, rel=1e-6, abs=1e-6)
    for name in ("eval/loss", "eval/rewards/accuracy"):
        assert results[name] == pytest.approx(wanted[name], rel=1e-6)
    strangers = PreferenceTrainer(config, rows, held_out).dataset_train[:4]
    if is_table:  # whose rows are known by their numbers
        cached.cache.scores("train", strangers)
        return
    with pytest.raises(RunError, match="set reference.scores to 'computed'"):
        cached.cache.scores("train", strangers)


@pytest.mark.long
def test_more_steps_need_more_scores_and_the_same_steps_need_none(train):
    rows = preference_rows(20)
    _, first = train(rows, **CACHED)
    same, again = train(rows, **CACHED, resume=True)
    assert (same.batches, again) == (0, first)
    longer, _ = train(rows, **CACHED, resume=True, steps=5)
    assert (longer.step, longer.batches) == (5, 1)


@pytest.fixture
def scores(tmp_path):
    """Function that opens the file of the folder with the given digests."""

    def scores(data="d", source="s"):
        return ReferenceScores(tmp_path / "scores", data=data, source=source, note=notes.append)

    notes = scores.notes = []
    with scores().adding("w"):
        pass
    first = scores()
    with first.adding("w"):
        first.add("train", torch.tensor([[0.1, -7.0], [float("-inf"), 2.5]], dtype=torch.float64))
    return scores


def test_the_same_bits_come_back(scores):
    again = scores()
    infinite = float("-inf")
    assert again.has({"train": 2}) and again.has({"train": 1, "eval": 0})
    assert not again.has({"train": 3}) and not again.has({"eval": 1})
    found = again.at("train", [1, 0, 1]).tolist()
    assert found == [[infinite, 2.5], [0.1, -7.0], [infinite, 2.5]]
    assert scores.notes == []


def test_scores_of_other_examples_are_not_used(scores):
    assert scores(data="other").count("train") == 0
    assert "examples or their order have changed" in scores.notes[0]


def test_the_weights_decide_if_the_files_of_the_reference_have_changed(scores):
    same = scores(source="touched")
    assert same.count("train") == 2 and not same.has({"train": 2})
    with same.adding("w"):
        assert same.has({"train": 2})
    assert scores(source="touched").has({"train": 2})
    assert scores.notes == []
    other = scores(source="changed")
    with other.adding("v"):
        assert other.count("train") == 0
    assert "the reference has changed" in scores.notes[0]
    assert scores(source="changed").count("train") == 0


def test_a_damaged_file_is_computed_again_and_an_unfinished_one_is_ignored(scores, tmp_path):
    whole = (tmp_path / "scores").read_bytes()
    (tmp_path / "scores.partial").write_bytes(whole[:20])
    assert scores().has({"train": 2})
    (tmp_path / "scores").write_bytes(whole[:-1])
    assert scores().count("train") == 0
    assert "it cannot be read" in scores.notes[0]


def test_added_entries_are_written_on_the_way_and_if_the_run_ends(scores, monkeypatch):
    entry = torch.zeros(1, 2, dtype=torch.float64)
    with_more = scores()
    with pytest.raises(KeyboardInterrupt), with_more.adding("w"):
        with_more.add("eval", entry)  # which is due, and is the first
        assert not with_more.add("eval", entry)
        assert scores().count("eval") == 1  # as a kill leaves them
        raise KeyboardInterrupt
    assert scores().count("eval") == 2


def test_the_digests_tell_what_the_scores_depend_on(examples_config, tmp_path):
    """Each change is one that changes a score, or the example that it belongs to."""

    def digest(rows, edit=lambda items: items, **fields):
        config = examples_config(**CACHED, **fields)
        trainer = PreferenceTrainer(config, rows, HELD_OUT)
        return data_digest(config, edit(trainer.dataset_train), trainer.dataset_eval)

    def with_another_mask(items):
        pair, *others = items
        mask = pair.chosen.trained.copy()
        mask[-1] = not mask[-1]
        return [replace(pair, chosen=replace(pair.chosen, trained=mask)), *others]

    rows = preference_rows(6)
    same = digest(rows)
    assert same == digest(preference_rows(6), steps=9)
    swapped = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in rows]
    changed = [
        digest(rows[::-1]),
        digest(rows[:5]),
        digest(swapped),
        digest(rows, seed=1),
        digest(rows, examples_per_step=3),
        digest(rows, **{"loss.length_normalized": True}),
        digest(rows, with_another_mask),
    ]
    assert len({same, *changed}) == 8

    config = examples_config(**{"model.hf_path": str(tmp_path)})
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"1")
    before = source_digest(config)
    assert source_digest(config) == before
    os.utime(weights, ns=(1, 1))
    assert source_digest(config) != before


def test_runs_that_cannot_cache_scores_are_refused(examples_config):
    config = examples_config(**CACHED, loss=SimPOLoss.Config())
    with pytest.raises(ConfigError, match="SimPOLoss compares with no reference"):
        PreferenceTrainer(config, preference_rows(6))
