import json

import pytest

from rl.observe.events import Events, print_texts
from rl.observe.record import RunRecord, rows_from_end, rows_of


@pytest.fixture
def record(tmp_path):
    return RunRecord(tmp_path / "run")


def written(record):
    return [row for row, _ in rows_of(record.events_path)]


def test_every_subscriber_gets_every_event_in_order():
    first, second = [], []
    events = Events(first.append)
    events.subscribe(second.append)
    events.emit("checkpoint", step=3)
    events.warn("the disk is slow")
    assert first == second
    assert [event["kind"] for event in first] == ["checkpoint", "warning"]
    assert first[0]["time"] <= first[1]["time"]


def test_warnings_and_notes_are_printed_and_other_events_are_not(capsys):
    events = Events(print_texts)
    events.note("resumed")
    events.emit("failed", text="the disk is full")
    events.emit("lost", process="generator-0", text="generator-0 died")
    assert capsys.readouterr().out == "resumed\ngenerator-0 died\n"


def test_metrics_and_evaluations_have_a_file_of_their_own_too(record):
    events = Events(record.write_event)
    events.emit("metrics", step=1, metrics={"step": 1, "loss/mean": float("nan")})
    events.emit("evaluation", step=1, metrics={"eval/loss": 2.0})
    metrics, evaluation = written(record)
    assert metrics["metrics"] == {"step": 1, "loss/mean": None}
    assert evaluation["metrics"] == {"eval/loss": 2.0}
    assert [row for row, _ in rows_of(record.metrics_path)] == [metrics["metrics"]]
    assert record.read_evaluations() == [{"step": 1, "eval/loss": 2.0}]


def test_spans_and_arrivals_are_written_with_the_next_other_event(record):
    events = Events(record.write_event)
    events.emit("span", process="trainer", name="forward", begin=1.0, end=2.0, step=1)
    events.emit("arrived", process="generator-0", version=1)
    assert not record.events_path.exists()
    events.note("here")
    assert [row["kind"] for row in written(record)] == ["span", "arrived", "note"]


def test_a_line_that_a_kill_cut_is_removed_before_new_ones_follow(record):
    events = Events(record.write_event)
    events.note("first")
    with record.events_path.open("a") as file:
        file.write('{"time": 1, "kind": "no')
    record.drop_after(0)
    events.note("second")
    assert [row["text"] for row in written(record)] == ["first", "second"]


def test_a_resume_cuts_metrics_and_no_events(record):
    events = Events(record.write_event)
    for step in (1, 2, 3):
        events.emit("metrics", step=step, metrics={"step": step})
    record.drop_after(1)
    assert [row["step"] for row in record.read_metrics()] == [1]
    assert [row["step"] for row in written(record)] == [1, 2, 3]


@pytest.mark.parametrize("torn", ["", '{"step'])
def test_rows_are_read_from_the_end(tmp_path, torn):
    path = tmp_path / "rows.jsonl"
    rows = [{"step": step, "text": "x" * (step * 13 % 40)} for step in range(30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + torn)
    assert [*rows_from_end(path)] == rows[::-1]


def test_a_file_without_rows_has_none_from_its_end(tmp_path):
    path = tmp_path / "rows.jsonl"
    assert [*rows_from_end(path)] == []
    for content in ("", "torn"):
        path.write_text(content)
        assert [*rows_from_end(path)] == []


def test_the_newest_rows_are_read_without_reading_the_whole_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    line = json.dumps({"step": 1, "text": "x" * 100}) + "\n"
    path.write_bytes(b"not JSON\n" * 100_000 + line.encode() * 1000)
    assert next(rows_from_end(path))["step"] == 1
