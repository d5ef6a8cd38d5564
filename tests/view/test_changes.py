"""Examples whose result changed between two evaluations."""

import pytest

from rl.observe.rollout_files import Chunk, write_rollouts
from rl.view.run import Run
from tests.kit.records import rollout
from tests.view.runs import make_run, write_evaluation


@pytest.fixture
def run(tmp_path):
    """Run with evaluations after the steps 5, 10, 15 and 20."""
    return Run(make_run(tmp_path / "run"))


def greedy(data):
    return [row for row in data["rows"] if row["kind"] == "greedy"]


def test_examples_with_another_result_are_found_with_both_answers(run):
    assert run.state()["evaluation_steps"] == [5, 10, 15, 20]
    data = run.changes(5, 10)  # right are the prompts 0 to 3, then 3 to 6
    rows = greedy(data)
    assert sorted((row["prompt_id"], row["change"]) for row in rows) == [
        *((0, -1.0), (1, -1.0), (2, -1.0), (4, 1.0), (5, 1.0), (6, 1.0))
    ]
    row = next(row for row in rows if row["prompt_id"] == 4)
    assert (row["before"], row["after"]) == (0.0, 1.0)
    assert (row["prompt"], row["answer"]) == ("question 4 the answer", "expected 4")
    assert row["text_before"] == "evaluation 0 says the answer"
    assert row["text_after"] == "evaluation 1 says the answer"
    assert len(data["rows"]) == 18  # and two sampled answers of each


def test_an_evaluation_of_the_initial_weights_is_step_0(tmp_path):
    folder = make_run(tmp_path / "run")
    rows = folder / "evaluations.jsonl"
    rows.write_text('{"step": 0, "eval/exact_match": 0.125}\n' + rows.read_text())
    write_evaluation(folder / "evaluations" / "step-0.parquet", place=1, text="the answer")
    run = Run(folder)
    assert run.state()["evaluation_steps"] == [0, 5, 10, 15, 20]
    steps, values = run.evaluations()["curves"]["eval/exact_match"]
    assert (steps[:2], values[:2]) == ([0, 5], [0.125, 0.25])
    assert len(greedy(run.changes(0, 5))) == 6


def test_both_sides_of_an_example_can_be_read_in_full(run):
    row = greedy(run.changes(5, 10))[-1]
    before = run.evaluated.rollout(5, row["index_before"])
    after = run.evaluated.rollout(10, row["index_after"])
    assert before["prompt_id"] == after["prompt_id"] == row["prompt_id"]
    assert (before["text"], after["text"]) == (row["text_before"], row["text_after"])
    assert after["sequences"][0]["turns"]


def test_tasks_are_counted_apart(run):
    tasks = [row for row in run.changes(5, 10)["tasks"] if row["kind"] == "greedy"]
    assert tasks == [
        {"kind": "greedy", "task": "<b>", "examples": 5, "better": 1, "worse": 1,
         "before": 0.4, "after": 0.4},
        {"kind": "greedy", "task": "sums", "examples": 5, "better": 2, "worse": 2,
         "before": 0.4, "after": 0.4},
    ]  # fmt: skip


def test_examples_of_one_evaluation_alone_are_counted(run):
    path = run.evaluated.path(10)
    write_evaluation(path, place=1, text="the answer", prompts=8)
    assert run.changes(5, 10)["in_one"] == 2 * 3
    write_evaluation(path, place=1, text="another question")
    data = run.changes(5, 10)
    assert (data["in_one"], data["rows"], data["tasks"]) == (60, [], [])


def test_long_answers_and_many_examples_are_cut_and_said_to_be(run, monkeypatch):
    monkeypatch.setattr("rl.view.run.ROWS", 7)
    data = run.changes(5, 10)
    assert len(data["rows"]) == 7
    assert len(greedy(data)) == 6
    assert data["left_out"] == 11
    monkeypatch.setattr("rl.view.run.EXAMPLES", 1)
    for step, place in ((15, 2), (20, 3)):
        path = run.evaluated.path(step)
        write_evaluation(path, place=place, text="x" * 1_000, prompts=1_000)
    data = run.changes(15, 20)
    assert data["not_compared"] == 2_000
    assert {len(row["text_after"]) for row in data["rows"]} == {160}


def test_a_file_that_is_missing_or_damaged_is_named(run):
    run.evaluated.path(10).write_bytes(b"no parquet")
    assert "evaluations/step-10.parquet cannot be read" in run.changes(5, 10)["error"]
    assert "evaluations/step-7.parquet cannot be read" in run.changes(7, 5)["error"]


def test_files_of_a_run_are_compared(run):
    """As rl.observe writes them, with a reward that is the same and another correctness."""
    for step, correct in ((5, 0.0), (10, 1.0)):
        each = rollout(3, 0, (2, 3))
        object.__setattr__(each, "metrics", {"correct": correct})
        write_rollouts(run.evaluated.path(step), [Chunk(rollouts=[each], columns={})])
    (row,) = run.changes(5, 10)["rows"]
    assert (row["change"], row["before"], row["after"]) == (1.0, 1 / 3, 1 / 3)
    assert (row["kind"], row["task"]) == ("greedy", "sums")
