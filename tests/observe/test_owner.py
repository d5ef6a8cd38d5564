"""One process at a time writes to a run folder."""

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from rl.errors import ConfigError, FolderInUse
from rl.observe import owner as owners
from rl.observe.owner import FolderOwner, claim


def write_rows(folder: Path, elsewhere: bool) -> None:
    """Own a folder and append to a file, as a run does, for as long as it may.

    With ``elsewhere``, do so as a process of another host, which cannot see the locks of this one.
    """
    if elsewhere:
        owners.boot = lambda: "another boot"
        owners._lock = lambda descriptor, wait=False: True
    owner = FolderOwner(folder)
    parent = os.getppid()
    while os.getppid() == parent:
        owner.check()
        with (folder / "rows").open("a") as rows:
            rows.write("row\n")
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    for name, seconds in {"RENEW_S": 0.1, "FENCE_S": 0.3, "LEASE_S": 1.0, "POLL_S": 0.02}.items():
        monkeypatch.setattr(owners, name, seconds)


@pytest.fixture
def writer(tmp_path):
    """Starts an owner of ``tmp_path`` in a process of its own."""
    started = []

    def start(*, elsewhere: bool = False) -> BaseProcess:
        process = multiprocessing.get_context("fork").Process(
            target=write_rows, args=(tmp_path, elsewhere)
        )
        process.start()
        started.append(process)
        within(60, lambda: (tmp_path / "rows").exists())
        return process

    yield start
    for process in started:
        kill(process)


def kill(process: BaseProcess) -> None:
    process.kill()
    process.join()


def within(seconds: float, condition) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)


def at_once(count: int, start: Callable[[], Any]) -> list[Any]:
    """Return the results of ``count`` calls of ``start`` that begin together."""
    gate = threading.Barrier(count)

    def begin(_: int) -> Any:
        gate.wait()
        return start()

    with ThreadPoolExecutor(count) as threads:
        return [*threads.map(begin, range(count), timeout=30)]


def test_a_second_owner_is_refused_with_the_name_of_the_first(tmp_path, monkeypatch):
    monkeypatch.setenv("TILLER_LOGS", str(tmp_path / "logs" / "17.2"))
    with (
        FolderOwner(tmp_path),
        pytest.raises(FolderInUse, match=r"is in use by process \d+ on \S+, attempt 17.2$"),
    ):
        FolderOwner(tmp_path)


def test_a_released_folder_has_no_trace_of_its_owner(tmp_path):
    for _ in range(2):
        FolderOwner(tmp_path / "run").release()
        assert not (tmp_path / "run").exists()


def test_a_killed_owner_on_this_host_is_replaced_at_once(tmp_path, writer, monkeypatch):
    first = writer()
    with pytest.raises(FolderInUse, match=f"process {first.pid} on"):
        FolderOwner(tmp_path)
    kill(first)
    monkeypatch.delattr(owners, "POLL_S")  # which a wait would read
    FolderOwner(tmp_path).release()


def test_an_empty_file_of_a_killed_owner_delays_a_start_by_seconds(tmp_path, monkeypatch):
    (tmp_path / "owner.json").touch()
    monkeypatch.setattr(owners, "RENEW_S", 0.5)
    monkeypatch.setattr(owners, "LEASE_S", 10**6)
    FolderOwner(tmp_path).release()


def test_a_host_that_changes_its_name_keeps_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(owners.socket, "gethostname", lambda: "a-long-name.of-a-host")
    with FolderOwner(tmp_path) as owner:
        monkeypatch.setattr(owners.socket, "gethostname", lambda: "short")
        owner._renew()
        owner._renew()
        assert json.loads((tmp_path / "owner.json").read_text())["host"] == "a-long-name.of-a-host"


def test_an_attempt_waits_for_the_owner_to_leave_and_no_longer_than_it_may(tmp_path, capsys):
    first = FolderOwner(tmp_path)
    started = time.monotonic()
    with pytest.raises(FolderInUse):
        FolderOwner(tmp_path, wait_s=0.3)
    assert time.monotonic() - started >= 0.3
    threading.Timer(0.5, first.release).start()
    with FolderOwner(tmp_path, wait_s=120):
        assert "waiting for its end" in capsys.readouterr().out


def test_an_owner_on_another_host_that_lives_is_refused(tmp_path, writer, monkeypatch):
    monkeypatch.setattr(owners, "LEASE_S", 120.0)
    writer(elsewhere=True)
    with pytest.raises(FolderInUse):
        FolderOwner(tmp_path)


def test_an_owner_on_another_host_that_died_is_replaced_when_its_lease_is_over(tmp_path, writer):
    first = writer(elsewhere=True)
    kill(first)
    started = time.monotonic()
    with FolderOwner(tmp_path):
        assert time.monotonic() - started >= 1.0


def test_an_owner_that_was_stopped_and_replaced_writes_nothing_more(tmp_path, writer, capfd):
    first = writer(elsewhere=True)
    os.kill(first.pid, signal.SIGSTOP)
    with FolderOwner(tmp_path):
        rows = (tmp_path / "rows").read_text()
        os.kill(first.pid, signal.SIGCONT)
        first.join(120)
        assert first.exitcode == 130
        assert "has taken this folder; this run ends" in capfd.readouterr().err
        assert (tmp_path / "rows").read_text() == rows


def test_an_owner_that_was_stopped_and_not_replaced_goes_on(tmp_path, writer):
    first = writer()
    os.kill(first.pid, signal.SIGSTOP)
    time.sleep(0.5)  # longer than FENCE_S
    rows = (tmp_path / "rows").stat().st_size
    os.kill(first.pid, signal.SIGCONT)
    within(120, lambda: (tmp_path / "rows").stat().st_size > rows)
    assert first.is_alive()


def test_missing_storage_blocks_writes_and_ends_nothing(tmp_path, monkeypatch):
    lost = []
    monkeypatch.setattr(owners, "end_program", lost.append)
    with FolderOwner(tmp_path) as owner:
        path = owner._path
        owner._path = Path("/dev/null/owner.json")  # every look at it fails with an OSError
        time.sleep(0.5)
        with pytest.raises(OSError):
            owner.check()
        owner._path = path
        owner.check()
        assert not lost


@pytest.mark.parametrize("killed", [False, True])
def test_one_of_many_concurrent_owners_gets_the_folder(tmp_path, writer, killed):
    if killed:
        first = writer()
        kill(first)

    def start() -> FolderOwner | None:
        try:
            return FolderOwner(tmp_path)
        except FolderInUse:
            return None

    [only] = filter(None, at_once(8, start))
    only.release()


def test_a_lock_on_a_replaced_file_does_not_count(tmp_path, writer, monkeypatch):
    kill(writer())
    faster = []
    lock = owners._lock

    def overtaken(descriptor, **options):
        if not faster:
            monkeypatch.setattr(owners, "_lock", lock)
            faster.append(FolderOwner(tmp_path))
        return lock(descriptor, **options)

    monkeypatch.setattr(owners, "_lock", overtaken)
    with pytest.raises(FolderInUse):
        FolderOwner(tmp_path)
    faster[0].release()


def test_two_runs_of_one_second_get_two_default_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rl.observe.owner.time.strftime", lambda form: "20260101-000000")
    owners_of = at_once(4, lambda: claim("quickstart", "", resume=False))
    first = "quickstart-20260101-000000"
    names = {first, *(f"{first}-{number}" for number in (2, 3, 4))}
    assert {owner.folder.name for owner in owners_of} == names
    for owner in owners_of:
        owner.release()


def test_a_run_written_while_waiting_for_its_owner_is_not_overwritten(tmp_path):
    first = FolderOwner(tmp_path)

    def finish():
        (tmp_path / "config.json").touch()
        first.release()

    threading.Timer(0.5, finish).start()
    with pytest.raises(ConfigError, match="already holds a run"):
        claim("quickstart", str(tmp_path), resume=False, wait_s=30)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
