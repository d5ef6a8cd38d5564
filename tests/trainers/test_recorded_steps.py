"""Parts of each step that the run folder keeps."""

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from rl.errors import RunError
from rl.observe.record import rows_of
from rl.observe.rollout_files import read_rollouts
from rl.trainers.report import Report
from tests.trainers.loops import evaluating, lost_once

SAMPLED = evaluating(samples=2)


@pytest.mark.parametrize(
    ("mode", "steps", "count"), [("all", [1, 2, 3], 4), ("sample", [1, 2, 3], 3), ("none", [], 0)]
)
def test_rollouts_are_recorded_as_the_config_says(run, mode, steps, count):
    run(steps=3, fields={"record.rollouts": mode, "record.sample": 3})
    files = run.record.rollouts
    assert files.steps() == steps
    for step in steps:
        assert sum(len(chunk.rollouts) for chunk in read_rollouts(files.path(step))) == count


def test_a_sample_begins_at_another_place_each_step(run):
    run(fields={"record.rollouts": "sample", "record.sample": 1})
    rollouts = [read_rollouts(run.record.rollouts.path(step))[0].rollouts for step in (1, 2, 3, 4)]
    assert len({(each.prompt.prompt_id % 2, each.sample) for (each,) in rollouts}) == 4


def test_the_oldest_steps_and_evaluations_make_room(run):
    run(steps=3, fields={"record.max_gib": 1e-9})
    assert run.record.rollouts.steps() == [3]
    run(fields=SAMPLED | {"record.max_gib": 1e-9}, folder="evaluated")
    assert (run.record.evaluated.steps(), run.record.rollouts.steps()) == ([4], [])


@pytest.mark.parametrize(
    ("mode", "pipeline"),
    [("all", "deterministic"), ("sample", "asynchronous"), ("none", "deterministic")],
)
def test_evaluations_are_recorded_whole_or_not_at_all(run, mode, pipeline):
    fields = SAMPLED | {"record.rollouts": mode, "record.sample": 1}
    run(steps=5, pipeline=pipeline, fields=fields)
    evaluations = {row["step"]: row for row in run.record.read_evaluations()}
    assert evaluations
    recorded = run.record.evaluated.steps()
    assert recorded == ([] if mode == "none" else sorted({*evaluations, 5}))
    for step in recorded:
        greedy, sampled = read_rollouts(run.record.evaluated.path(step))
        places = [
            [(each.prompt.prompt_id, each.sample) for each in chunk.rollouts]
            for chunk in (greedy, sampled)
        ]
        assert places == [
            [(prompt, 0) for prompt in range(3)],
            [(prompt, sample) for prompt in range(3) for sample in range(2)],
        ]
        row = evaluations.get(step, run.summary)
        correct = [each.metrics["correct"] for each in greedy.rollouts]
        assert sum(correct) / 3 == row["eval/exact_match"]
        if pipeline == "deterministic":
            drawn = [s.versions for each in greedy.rollouts for s in each.sequences]
            assert {*np.concatenate(drawn).tolist()} == {-1, step}


def test_a_resume_replaces_what_was_recorded_after_its_checkpoint(run):
    options = {"save_every": 2, "fields": evaluating(every=1)}
    run(**options)
    folders = (run.record.rollouts, run.record.evaluated)

    def times():
        return [
            {step: folder.path(step).stat().st_mtime_ns for step in folder.steps()}
            for folder in folders
        ]

    before = times()
    run(**options, steps=3, saved={2: run.saved[2]})
    for old, new in zip(before, times(), strict=True):
        assert [*old] == [1, 2, 3, 4]
        assert [new[step] == old[step] for step in new] == [True, True, False]
    assert [row["step"] for row, _ in rows_of(run.record.digests_path)] == [1, 2, 3]


def test_an_evaluation_that_a_kill_interrupted_is_repeated_with_its_file(run, monkeypatch):
    """The kill comes between the file and the row of the evaluation."""
    evaluation = Report.evaluation

    def killed_at_2(self, at, scores):
        if at == 2:
            raise RunError("killed")
        evaluation(self, at, scores)

    options = {"save_every": 1, "staleness": 1, "fields": evaluating(every=1, samples=2)}
    with monkeypatch.context() as patch:
        patch.setattr("rl.trainers.report.Report.evaluation", killed_at_2)
        with pytest.raises(RunError, match="killed"):
            run(**options)
    files = run.record.evaluated
    assert files.steps() == [1, 2]
    assert [row["step"] for row in run.record.read_evaluations()] == [1]
    before = files.path(2).stat().st_mtime_ns
    run(**options, saved={max(run.saved): run.saved[max(run.saved)]})
    assert [row["step"] for row in run.record.read_evaluations()] == [1, 2, 3]
    assert files.steps() == [1, 2, 3, 4]
    assert files.path(2).stat().st_mtime_ns != before


def test_a_recorded_step_has_what_was_trained_and_the_folder_its_tokenizer(run):
    run(steps=2)
    (chunk,) = read_rollouts(run.record.rollouts.path(2))
    sampled = np.concatenate([s.sampled for each in chunk.rollouts for s in each.sequences])
    assert {"advantages", "trainer_logprobs", "entropy"} <= {*chunk.columns}
    assert {each.prompt.prompt_id for each in chunk.rollouts} == {2, 3}
    for column in chunk.columns.values():
        assert len(column) == len(sampled)
        assert not column[~sampled].any()
    assert chunk.columns["trainer_logprobs"][sampled].all()
    folder = run.record.folder / "tokenizer"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokens = chunk.rollouts[0].prompt.tokens
    assert tokenizer.decode(tokens) == run.loop.dataset_train.tokenizer.decode(tokens)
    assert not folder.with_name("tokenizer.partial").exists()


def test_the_chunks_of_a_stream_are_told_apart(run):
    chunks = {"rollout.stream_chunks": 2}
    run(steps=2, staleness=1, pipeline="asynchronous", fields=chunks)
    assert len(read_rollouts(run.record.rollouts.path(1))) == 2


@pytest.mark.parametrize("digests", [True, False])
def test_digests_are_recorded_unless_the_config_says_no(run, digests):
    """The trainer is lost between the two updates of the third step, whose digest is forgotten."""
    run(
        lost_once(5),
        save_every=1,
        fields={"record.digests": digests, "algorithm.update_epochs": 2},
    )
    assert run.trainer.starts == 2
    rows = [row for row, _ in rows_of(run.record.digests_path)]
    assert [row["step"] for row in rows] == ([1, 2, 3, 4] if digests else [])
    for row in rows:
        assert [[*update] for update in row["trainer"]] == [["gradient", "weights"]] * 2
