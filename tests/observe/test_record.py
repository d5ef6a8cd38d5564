import asyncio
import errno
import json
import math
import os
import threading
from pathlib import Path

import pytest

from rl.errors import ConfigError, RunError
from rl.host.disk import failing_loudly
from rl.observe.owner import run_folder
from rl.observe.record import RunRecord


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def refuse_constant(name):
    raise AssertionError(f"{name} is not JSON")


@pytest.fixture
def record(tmp_path):
    return RunRecord(tmp_path / "run")


def fill(record, steps):
    for step in range(1, steps + 1):
        record.append(record.metrics_path, {"step": step, "reward/mean": step / 10})
        record.append(record.digests_path, {"step": step, "trainer": [{"gradient": {"w": "0"}}]})
        record.append(
            record.ledger_path, {"trained": [2 * step, 2 * step + 1], "dropped": {}, "step": step}
        )
        if step % 2 == 0:
            record.append(record.evaluations_path, {"eval/exact_match": step / 10, "step": step})


def test_the_folder_has_the_promised_layout_and_rows_read_back_as_written(record):
    assert record.read_metrics() == record.read_evaluations() == []
    record.write_json("config.json", {"model": {"dim": 64}})
    fill(record, 2)
    record.write_json("summary.json", {"steps": 1})
    record.write_failure({"error": "x"})
    assert {path.name for path in record.folder.iterdir()} == {
        *("config.json", "metrics.jsonl", "digests.jsonl", "ledger.jsonl", "evaluations.jsonl"),
        *("checkpoints", "logs", "summary.json", "failure.json"),
    }
    assert json.loads((record.folder / "config.json").read_text()) == {"model": {"dim": 64}}
    assert record.read_metrics() == [{"step": step, "reward/mean": step / 10} for step in (1, 2)]
    assert [*record.read_evaluations()[0].items()] == [("step", 2), ("eval/exact_match", 0.2)]


def test_the_ledger_has_the_prompt_ids_of_each_step(record):
    record.append(
        record.ledger_path,
        {"trained": [3, 5], "dropped": {"reward raised": [4]}, "step": 1, "waiting": 2},
    )
    assert record.ledger_path.read_text() == (
        '{"step": 1, "trained": [3, 5], "dropped": {"reward raised": [4]}, "waiting": 2}\n'
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_written_as_null(record, value):
    record.append(record.metrics_path, {"step": 1, "loss/mean": value, "parts": [value, 1.0]})
    record.append(record.evaluations_path, {"step": 1, "eval/loss": value})
    record.write_json("summary.json", {"deep": {"loss": value}})
    for path in (record.metrics_path, record.folder / "summary.json"):
        json.loads(path.read_text(), parse_constant=refuse_constant)
    assert lines(record.metrics_path) == [{"step": 1, "loss/mean": None, "parts": [None, 1.0]}]
    assert math.isnan(record.read_metrics()[0]["loss/mean"])
    assert math.isnan(record.read_evaluations()[0]["eval/loss"])


@pytest.mark.parametrize("path", ["metrics_path", "ledger_path", "evaluations_path"])
def test_rows_without_a_step_are_refused(record, path):
    with pytest.raises(KeyError):
        record.append(getattr(record, path), {"reward/mean": 1.0})


def test_an_incomplete_last_line_is_skipped_and_dropped(record):
    fill(record, 3)
    with record.metrics_path.open("a") as file:
        file.write('{"step": 4, "rew')
    assert [row["step"] for row in RunRecord(record.folder).read_metrics()] == [1, 2, 3]
    record.drop_after(3)
    record.append(record.metrics_path, {"step": 4})
    assert [row["step"] for row in lines(record.metrics_path)] == [1, 2, 3, 4]


def test_a_broken_line_in_the_middle_is_named(record):
    record.metrics_path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(RunError, match=r"metrics.jsonl line 2: not JSON"):
        record.read_metrics()


@pytest.mark.parametrize("step", [0, 2, 5, 9])
def test_resuming_drops_rows_after_the_checkpoint(record, step):
    fill(record, 5)
    record.write_json("summary.json", {})
    record.write_failure({})
    for profiled in (1, 4):
        record.profiles.path(profiled).mkdir(parents=True)
    record.drop_after(step)
    kept = list(range(1, min(step, 5) + 1))
    assert [row["step"] for row in lines(record.metrics_path)] == kept
    assert [row["step"] for row in lines(record.digests_path)] == kept
    assert [row["step"] for row in lines(record.ledger_path)] == kept
    assert [row["step"] for row in record.read_evaluations()] == [
        number for number in kept if number % 2 == 0
    ]
    assert record.profiles.steps() == [each for each in (1, 4) if each <= step]
    assert not (record.folder / "failure.json").exists()
    assert not (record.folder / "summary.json").exists()


def test_resuming_before_anything_was_written_is_fine(record):
    record.drop_after(0)
    assert record.read_metrics() == []


def test_a_full_disk_is_named_with_its_file(record):
    record.metrics_path.symlink_to("/dev/full")
    said = "metrics.jsonl: cannot be written: No space left on device"
    with pytest.raises(RunError, match=said):
        record.append(record.metrics_path, {"step": 1})


def test_a_write_that_fails_leaves_the_old_file_whole(record):
    record.write_json("summary.json", {"steps": 1})
    (record.folder / "summary.json.partial").symlink_to("/dev/full")
    with pytest.raises(RunError, match="summary.json"):
        record.write_json("summary.json", {"steps": 2})
    assert json.loads((record.folder / "summary.json").read_text()) == {"steps": 1}


@pytest.fixture
def synced(monkeypatch):
    """Gives each fsync as (name, bytes that the file had then)."""
    calls = []
    fsync = os.fsync

    def spy(descriptor):
        calls.append(
            (Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, os.fstat(descriptor).st_size)
        )
        fsync(descriptor)

    monkeypatch.setattr("rl.observe.record.os.fsync", spy)
    return calls


def test_a_row_is_on_disk_when_append_returns_and_costs_one_fsync(record, synced):
    for step, new in ((1, 3), (2, 1)):  # the file of evaluations is new in the second round
        fill(record, step)
        assert [name for name, _ in synced].count("run") == new
        files = [name for name, _ in synced if name != "run"]
        assert files[:3] == ["metrics.jsonl", "digests.jsonl", "ledger.jsonl"]
        last = dict(synced)
        assert last["metrics.jsonl"] == record.metrics_path.stat().st_size
        assert last["digests.jsonl"] == record.digests_path.stat().st_size
        synced.clear()


def test_a_json_file_is_on_disk_before_it_takes_its_place(record, synced):
    record.write_json("summary.json", {"steps": 1})
    size = (record.folder / "summary.json").stat().st_size
    assert synced[0] == ("summary.json.partial", size)
    assert [name for name, _ in synced] == ["summary.json.partial", "run"]


@pytest.mark.parametrize(
    ("numbers", "advice"),
    [
        ((errno.ENOSPC, errno.EDQUOT), "make room or "),
        ((errno.EACCES, errno.EROFS), "make it writable for this user or "),
        ((errno.ENOTDIR,), ""),
        ((errno.EIO, errno.ESTALE), "check the storage or "),
    ],
)
def test_the_advice_fits_the_error(numbers, advice):
    for number in numbers:
        with pytest.raises(RunError) as failure, failing_loudly(Path("a/b")):
            raise OSError(number, os.strerror(number))
        said = f"{os.strerror(number)}; {advice}choose another --output-dir"
        assert str(failure.value) == f"a/b: cannot be written: {said}"


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(RunError, match="run/checkpoints"):
        RunRecord(tmp_path / "run")


def test_a_folder_that_cannot_be_read_is_named():
    folder = "x" * 300
    with pytest.raises(ConfigError, match=f"output_dir: {folder} cannot be read: File name too lo"):
        run_folder("quickstart", folder, resume=False)


def test_a_failure_is_written_after_the_rollouts_that_wait_to_be_written(record, monkeypatch):
    may_write = threading.Event()
    written = list[int]()

    def write(step, chunks, **options):
        assert may_write.wait(10)
        written.append(step)

    monkeypatch.setattr(record.rollouts, "write", write)
    asyncio.run(record.begin_rollouts(1, []))
    failing = threading.Thread(target=record.write_failure, args=({"error": "x"},))
    failing.start()
    failing.join(0.2)
    assert not (record.folder / "failure.json").exists()
    may_write.set()
    failing.join(10)
    assert written == [1]
    assert (record.folder / "failure.json").exists()
