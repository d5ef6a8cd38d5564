"""Parts of each step that the run folder keeps."""

import json

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from rl.observe.record import rows_of
from rl.observe.rollouts import read_rollouts
from tests.trainers.loops import free


@pytest.mark.parametrize(
    ("mode", "steps", "count"), [("all", [1, 2, 3], 4), ("sample", [1, 2, 3], 3), ("none", [], 0)]
)
def test_rollouts_are_recorded_as_the_config_says(run, mode, steps, count):
    def edit(config):
        config.record.rollouts = mode
        config.record.sample = 3

    run(steps=3, edit=edit)
    files = run.record.rollouts
    assert files.steps() == steps
    for step in steps:
        assert sum(len(chunk.rollouts) for chunk in read_rollouts(files.path(step))) == count


def test_a_sample_begins_at_another_place_each_step(run):
    def edit(config):
        config.record.rollouts = "sample"
        config.record.sample = 1

    run(steps=4, edit=edit)
    rollouts = [read_rollouts(run.record.rollouts.path(step))[0].rollouts for step in (1, 2, 3, 4)]
    assert len({(each.prompt.prompt_id % 2, each.sample) for (each,) in rollouts}) == 4


def test_the_oldest_steps_make_room(run):
    def edit(config):
        config.record.max_gib = 1e-9

    run(steps=3, edit=edit)
    assert run.record.rollouts.steps() == [3]


def test_a_recorded_step_has_what_was_trained(run):
    run(steps=2)
    (chunk,) = read_rollouts(run.record.rollouts.path(2))
    sampled = np.concatenate([s.sampled for each in chunk.rollouts for s in each.sequences])
    assert {"advantages", "trainer_logprobs", "entropy"} <= {*chunk.columns}
    assert {each.prompt.prompt_id for each in chunk.rollouts} == {2, 3}
    for column in chunk.columns.values():
        assert len(column) == len(sampled)
        assert not column[~sampled].any()
    assert chunk.columns["trainer_logprobs"][sampled].all()


def test_the_chunks_of_a_stream_are_told_apart(run):
    def edit(config):
        free(config)
        config.rollout.stream_chunks = 2

    run(steps=2, staleness=1, edit=edit)
    assert len(read_rollouts(run.record.rollouts.path(1))) == 2


@pytest.mark.parametrize("digests", [True, False])
def test_digests_are_recorded_unless_the_config_says_no(run, digests):
    def edit(config):
        config.record.digests = digests

    run(steps=3, edit=edit)
    rows = [row for row, _ in rows_of(run.record.digests_path)]
    assert [row["step"] for row in rows] == ([1, 2, 3] if digests else [])
    assert all([*each] == ["gradient", "weights"] for row in rows for each in row["trainer"])


def test_digests_of_a_step_that_was_lost_are_forgotten(run):
    """The trainer dies between the two updates of the third step."""

    def edit(config):
        config.algorithm.update_epochs = 2

    def prepare(trainer, generator):
        async def train():
            if trainer.version == 5 and trainer.starts == 1:
                raise trainer.lose("forward_backward")

        trainer.during["forward_backward"] = train

    run(prepare, steps=4, save_every=1, edit=edit)
    assert run.trainer.starts == 2
    rows = [row for row, _ in rows_of(run.record.digests_path)]
    assert [len(row["trainer"]) for row in rows] == [2, 2, 2, 2]


def test_a_resume_drops_what_was_recorded_after_its_checkpoint(run):
    run(steps=3, save_every=2)
    assert run.record.rollouts.steps() == [1, 2, 3]
    saved = {2: json.loads(json.dumps(run.saved[2]))}
    before = run.record.rollouts.path(3).stat().st_mtime_ns
    run(steps=4, save_every=2, saved=saved)
    assert run.record.rollouts.steps() == [1, 2, 3, 4]
    assert run.record.rollouts.path(3).stat().st_mtime_ns != before
    assert [row["step"] for row, _ in rows_of(run.record.digests_path)] == [1, 2, 3, 4]


def test_the_run_folder_has_the_tokenizer(run):
    run(steps=1)
    folder = run.record.folder / "tokenizer"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    (chunk,) = read_rollouts(run.record.rollouts.path(1))
    prompt = chunk.rollouts[0].prompt
    assert tokenizer.decode(prompt.tokens) == run.loop.dataset_train.tokenizer.decode(prompt.tokens)
    assert not folder.with_name("tokenizer.partial").exists()
