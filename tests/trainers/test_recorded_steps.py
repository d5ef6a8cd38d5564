"""Parts of each step that the run folder keeps."""

import json

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from rl.errors import RunError
from rl.observe.record import rows_of
from rl.observe.rollouts import read_rollouts
from rl.trainers.report import Report
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


def test_the_oldest_evaluations_make_room_too(run):
    def edit(config):
        evaluating(config)
        config.record.max_gib = 1e-9

    run(steps=4, edit=edit)
    assert run.record.evaluated.steps() == [4]
    assert run.record.rollouts.steps() == []


def evaluating(config):
    config.evaluation.prompts = 3
    config.evaluation.samples = 2
    config.evaluation.every = 2


@pytest.mark.parametrize(
    ("mode", "edit"),
    [
        ("all", evaluating),
        ("sample", lambda config: (free(config), evaluating(config))),
        ("none", evaluating),
    ],
    ids=["all", "sample", "none"],
)
def test_evaluations_are_recorded_whole_or_not_at_all(run, mode, edit):
    def edited(config):
        edit(config)
        config.record.rollouts = mode
        config.record.sample = 1

    run(steps=5, edit=edited)
    during = [row["step"] for row in run.record.read_evaluations()]
    assert during
    assert run.record.evaluated.steps() == ([] if mode == "none" else sorted({*during, 5}))
    for step in run.record.evaluated.steps():
        chunks = read_rollouts(run.record.evaluated.path(step))
        rows = [[(each.prompt.prompt_id, each.sample) for each in c.rollouts] for c in chunks]
        assert rows == [
            [(prompt, 0) for prompt in range(3)],
            [(prompt, sample) for prompt in range(3) for sample in range(2)],
        ]


def test_a_recorded_evaluation_has_the_scores_that_were_reported(run):
    run(steps=3, edit=evaluating)
    (row,) = run.record.read_evaluations()
    greedy, _ = read_rollouts(run.record.evaluated.path(2))
    correct = [each.metrics["correct"] for each in greedy.rollouts]
    assert sum(correct) / 3 == row["eval/exact_match"]
    versions = np.concatenate([s.versions for each in greedy.rollouts for s in each.sequences])
    assert {*versions.tolist()} == {-1, 2}


def test_a_resume_replaces_the_evaluations_after_its_checkpoint(run):
    def edit(config):
        evaluating(config)
        config.evaluation.every = 1

    run(steps=4, save_every=2, edit=edit)
    files = run.record.evaluated
    assert files.steps() == [1, 2, 3, 4]
    before = {step: files.path(step).stat().st_mtime_ns for step in files.steps()}
    saved = {2: json.loads(json.dumps(run.saved[2]))}
    run(steps=3, save_every=2, saved=saved, edit=edit)
    assert files.steps() == [1, 2, 3]
    again = {step: files.path(step).stat().st_mtime_ns for step in files.steps()}
    assert [again[step] == before[step] for step in (1, 2, 3)] == [True, True, False]


def test_an_evaluation_that_a_kill_interrupted_is_repeated_with_its_file(run, monkeypatch):
    """The kill comes between the file and the row of the evaluation."""

    def edit(config):
        evaluating(config)
        config.evaluation.every = 1

    with monkeypatch.context() as patch:
        patch.setattr("rl.trainers.report.Report.evaluation", killed_at(2))
        with pytest.raises(RunError, match="killed"):
            run(steps=4, save_every=1, staleness=1, edit=edit)
    files = run.record.evaluated
    assert files.steps() == [1, 2]
    assert [row["step"] for row in run.record.read_evaluations()] == [1]
    before = files.path(2).stat().st_mtime_ns
    step = max(run.saved)
    run(steps=4, save_every=1, staleness=1, edit=edit, saved={step: run.saved[step]})
    assert [row["step"] for row in run.record.read_evaluations()] == [1, 2, 3]
    assert files.steps() == [1, 2, 3, 4]
    assert files.path(2).stat().st_mtime_ns != before


def killed_at(step):
    """Return a method in place of Report.evaluation that ends the run before the row of
    ``step``.
    """
    evaluation = Report.evaluation

    def report(self, at, scores):
        if at == step:
            raise RunError("killed")
        evaluation(self, at, scores)

    return report


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
