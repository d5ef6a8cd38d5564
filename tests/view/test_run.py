"""Reader of run folders."""

import json
import subprocess
import sys

import pytest

from rl.errors import ConfigError
from rl.view.rollouts import _schemas
from rl.view.run import Run
from tests.view.runs import BEGAN, line, make_run, metrics_of, write_evaluation, write_rollouts


@pytest.fixture
def folder(tmp_path):
    return make_run(tmp_path / "run")


def append(path, *rows):
    with open(path, "a") as file:
        file.write("".join(map(line, rows)))


def test_rows_that_a_run_adds_are_read_once_and_a_torn_last_line_waits_for_its_end(folder):
    run = Run(folder)
    row = line(metrics_of(21))
    for part, step in (("", 20), (row[:30], 20), (row[30:], 21)):
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(part)
        assert run.state()["step"] == step
    steps, values = run.curves(["reward/mean"])["curves"]["reward/mean"]
    assert steps == [*range(1, 22)]
    assert values == [1 - 1 / step for step in steps]


@pytest.mark.parametrize("block", [10, 1_000])
def test_long_files_are_read_in_blocks(folder, block, monkeypatch):
    monkeypatch.setattr("rl.view.history.BLOCK", block)
    run = Run(folder)
    assert run.state()["step"] == 20
    assert run.curves(["reward/mean"])["curves"]["reward/mean"][0] == [*range(1, 21)]
    assert len(run.timeline(7, 2)["spans"]) == 16


@pytest.mark.parametrize("again", [0, 3, 40])
def test_rows_that_a_resume_took_back_are_forgotten(folder, again):
    """Also if the file has grown past its old end before it is read again."""
    run = Run(folder)
    run.state()
    path = folder / "metrics.jsonl"
    rows = path.read_text().splitlines(keepends=True)[:10]
    path.write_text("".join(rows))
    append(path, *(metrics_of(step) | {"reward/mean": 7.0} for step in range(11, 11 + again)))
    steps, values = run.curves(["reward/mean"])["curves"]["reward/mean"]
    assert steps == [*range(1, 11 + again)]
    assert values[10:] == [7.0] * again


def test_a_curve_of_many_points_keeps_its_ends_and_peaks(tmp_path):
    folder = make_run(tmp_path / "run", steps=9_000, metrics=0, recorded=0)
    path = folder / "metrics.jsonl"
    rows = [json.loads(each) for each in path.read_text().splitlines()]
    rows[4_321]["reward/mean"] = 99.0
    path.write_text("".join(map(line, rows)))
    steps, values = Run(folder).curves(["reward/mean"], 500)["curves"]["reward/mean"]
    assert 300 < len(steps) <= 502
    assert (steps[0], steps[-1]) == (1, 9_000)
    assert values[steps.index(4_322)] == 99.0
    assert len(Run(folder).curves(["reward/mean"], 10**9)["curves"]["reward/mean"][0]) <= 2_002


def test_the_timeline_has_the_spans_of_its_steps(folder):
    spans = Run(folder).timeline(7, 2)["spans"]
    assert (len(spans), {span[4] for span in spans}) == (16, {7, 8})
    assert min(span[2] for span in spans) == BEGAN + 6


def test_spans_that_a_resume_took_back_are_no_part_of_the_timeline(folder):
    append(
        folder / "events.jsonl",
        {"time": BEGAN + 50, "kind": "started", "step": 5, "host": "there", "pid": 2},
        {"time": BEGAN + 52, "kind": "span", "process": "trainer", "name": "train", "step": 6,
         "begin": BEGAN + 51, "end": BEGAN + 52},
        {"time": BEGAN + 52, "kind": "metrics", "step": 6, "metrics": metrics_of(6)},
    )  # fmt: skip
    run = Run(folder)
    assert [span[2] for span in run.timeline(6, 1)["spans"]] == [BEGAN + 51]
    assert len(run.timeline(5, 1)["spans"]) == 8
    assert [each["step"] for each in run.state()["starts"]] == [0, 5]


def test_numbers_of_a_rollout_are_over_its_sampled_tokens(folder):
    rows = Run(folder).rollouts.table(20)["rows"]
    assert len(rows) == 8
    row = rows[5]
    assert (row["length"], row["tokens"], row["turns"]) == (4, 7, 1)
    assert row["staleness"] == pytest.approx(1.0)
    assert row["advantage"] == pytest.approx(3.5)
    assert row["gap"] == pytest.approx(0.05)
    assert (row["prompt_id"], row["sample"], row["stop_reason"]) == (1, 1, "stop")


def test_turns_of_a_rollout_are_told_apart(tmp_path):
    folder = make_run(tmp_path / "run", turns=3)
    found = Run(folder).rollouts.rollout(20, 1)
    (sequence,) = found["sequences"]
    turns = [(turn["sampled"], turn["count"]) for turn in sequence["turns"]]
    assert turns == [(False, 3), (True, 4)] * 3
    assert sequence["texts"][4] == "<b>"
    assert sequence["turns"][1]["parts"] == [["text", "w3 <b> w5"], ["control", "w6"]]
    assert [place for place, control in enumerate(sequence["control"]) if control] == [6]
    assert found["metrics"] == {"correct": 1.0, "calls": [2.0, 1.0, "max"]}
    assert len(sequence["columns"]["advantages"]) == 21


@pytest.mark.parametrize(("turns", "shown"), [(1, "the answer"), (3, "w17 w18 w19 w20")])
def test_the_list_shows_the_last_answer_of_an_episode(tmp_path, turns, shown):
    """The text of an episode begins with its system prompt."""
    run = Run(make_run(tmp_path / "run", turns=turns))
    assert {row["text"] for row in run.rollouts.table(20)["rows"]} == {shown}
    for place, step in enumerate((5, 10)):
        path = run.evaluated.path(step)
        write_evaluation(path, place=place, text="the answer", turns=turns)
    row = run.changes(5, 10)["rows"][0]
    says = [f"evaluation {place} says the answer" for place in (0, 1)]
    assert [row["text_before"], row["text_after"]] == (says if turns == 1 else [shown] * 2)


def test_prompts_of_a_list_are_shown_without_the_lines_that_all_share(tmp_path):
    run = Run(make_run(tmp_path / "run", rollouts=8, text="Be kind. " * 40))
    shown = {row["prompt"][:18] for row in run.rollouts.table(20)["rows"]}
    assert shown == {"prompt 0 Be kind. ", "prompt 1 Be kind. "}


ONE = '{"type": "function", "function": {"name": "add", "parameters": {}}}'
TWO = '{\n  "name": "sub",\n  "parameters": {}\n}'


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f"Use:\n{ONE}\n{TWO}\nor not", ["Use:\n", f"{ONE}\n{TWO}", "\nor not"]),
        (f"[{ONE}, {ONE}]", [f"[{ONE}, {ONE}]"]),
        (f"{ONE}\nthen\n{TWO}", [ONE, "\nthen\n", TWO]),
        (f'[]\n{{"name": "add"}}\n[1]\n{{"function": 1}}\n{ONE[:-1]}', None),
        ('{"a":\n' * 5_000, None),
    ],
)
def test_schemas_of_tools_are_parts_of_their_own(text, parts):
    found = _schemas(text)
    assert [part for _, part in found] == (parts or [text])
    assert all(
        (kind == "tools") == ('"parameters"' in part and parts is not None) for kind, part in found
    )


def test_missing_columns_and_damaged_files_are_tolerated(folder):
    path = folder / "rollouts" / "step-20.parquet"
    write_rollouts(path, step=20, count=3, without=("reward", "stop_reason", "metrics"))
    run = Run(folder)
    assert len(run.rollouts.table(20)["rows"]) == 3
    assert run.rollouts.rollout(20, 2)["sequences"]
    assert "cannot be read" in run.rollouts.rollout(20, 9)["error"]
    path.write_bytes(b"no parquet")
    assert "step-20.parquet cannot be read" in run.rollouts.table(20)["error"]
    assert "cannot be read" in run.rollouts.table(99)["error"]


def test_long_texts_and_sequences_are_cut_and_said_to_be(tmp_path):
    folder = make_run(tmp_path / "run", recorded=1, rollouts=2, text="x" * 10_000_000)
    found = Run(folder).rollouts.rollout(20, 0)
    assert len(found["text"]) == 100_000
    assert any("10,000,000 characters" in each for each in found["cut"])
    write_rollouts(folder / "rollouts" / "step-20.parquet", step=20, count=1, turns=5_000)
    found = Run(folder).rollouts.rollout(20, 0)
    assert len(found["sequences"][0]["tokens"]) == 20_000
    assert any("of 35,000" in each for each in found["cut"])


def test_the_status_is_that_of_the_files(folder):
    run = Run(folder)
    assert run.state()["status"] == "done"
    (folder / "summary.json").unlink()
    assert run.state()["status"] == "stopped"
    (folder / "owner.json").write_text('{"boot": "another", "pid": 1}')
    assert run.state()["status"] == "running"
    (folder / "failure.json").write_text('{"error": "out of memory"}')
    assert (run.state()["status"], run.state()["status_text"]) == ("failed", "out of memory")


def test_the_evaluation_after_the_last_step_is_a_point_of_its_curves(folder):
    """The summary alone has its numbers."""
    final = {"eval/exact_match": 0.75, "eval/loss": 0.5, "eval/version_min": None}
    summary = {"steps": 20, "policy_digest": "a", **final}
    (folder / "summary.json").write_text(json.dumps(summary))
    rows = (folder / "evaluations.jsonl").read_text().splitlines(keepends=True)
    path = folder / "evaluations.jsonl"
    for kept, steps in ((0, [20]), (2, [5, 10, 20]), (4, [5, 10, 15, 20])):
        path.write_text("".join(rows[:kept]))
        run = Run(folder)
        found = run.evaluations()["curves"]
        values = [0.25, 0.5, 0.75, 1.0][:kept] + [0.75] * (kept < 4)
        assert found["eval/exact_match"] == [steps, values]
        assert found["eval/loss"] == [[20], [0.5]]
        assert {"eval/exact_match", "eval/loss"} <= {*run.state()["evaluation_names"]}
        assert run.curves(["eval/loss"])["curves"] == {"eval/loss": [[20], [0.5]]}


def test_files_that_appear_later_are_read(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    run = Run(tmp_path)
    assert run.state()["status"] == "starting"
    assert run.timeline(1, 1)["spans"] == []
    assert run.evaluations() == {"curves": {}}
    append(tmp_path / "metrics.jsonl", metrics_of(1))
    assert run.state()["step"] == 1


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no run; it has none of config.json"):
        Run(tmp_path)
    with pytest.raises(ConfigError, match="is not a folder"):
        Run(tmp_path / "missing")


def test_configs_are_flat_with_dotted_names(folder):
    fields = {"steps": 20, "rollout.max_tokens": 8, "task.name": "the answer"}
    assert Run(folder).config()["fields"] == fields


def test_logs_and_ledger_of_a_failure_are_bounded(folder):
    (folder / "logs" / "long.log").write_text("row\n" * 100_000)
    data = Run(folder).failure()
    assert max(len(log["text"]) for log in data["logs"]) <= 8_000
    assert len(data["ledger"]) == 20
    assert data["ledger"][-1]["trained_now"] == 1


def test_reading_needs_no_torch(folder):
    code = (
        "import sys; from rl.view.__main__ import main; import rl.view.server, rl.view.export\n"
        f"run = rl.view.run.Run(__import__('pathlib').Path({str(folder)!r}))\n"
        "run.state(), run.rollouts.table(20), run.rollouts.rollout(20, 0)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout == "False\n", done.stderr
