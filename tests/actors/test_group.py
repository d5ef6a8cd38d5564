"""Every call to an actor ends, with results in rank order or with the name of the failed rank."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import monarch.actor
import pytest
import torch
import torch.distributed as dist
from monarch.actor import Actor, current_rank

from rl.actors import fork_server
from rl.actors import hosts as run_hosts
from rl.actors.endpoint import endpoint
from rl.actors.fork_server import GUARDED, LOG
from rl.actors.group import KEPT_LOG_BYTES, MOST_LOG_BYTES, ActorGroup, _tail
from rl.actors.guard import parent_of
from rl.actors.hosts import Hosts
from rl.actors.processes import ensure_runtime
from rl.errors import ActorFailure, RankLost, end_program
from rl.host.process import LEAVING
from rl.types import Place
from tests import warm
from tests.kit.processes import assert_ended, failure_of, wait_until_delivered

LONG = 200.0


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError("no text today")


class Moody(Actor):
    def __init__(self, mood: str):
        self._mood = mood
        self._progressed = time.monotonic()
        self._rank = current_rank().rank
        if mood == "dying" and self._rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    @endpoint
    async def say(self, word: str) -> str:
        return (
            f"{self._mood} {word} {self._rank} {os.environ['RANK']}/{os.environ['WORLD_SIZE']} "
            f"{os.environ['EXTRA']}"
        )

    @endpoint
    async def fail_on_rank_1(self) -> None:
        if self._rank == 1:
            raise ValueError("not today")
        await asyncio.sleep(3600)  # like a peer that waits in a collective

    @endpoint
    async def fail_without_text(self) -> None:
        raise Unprintable

    @endpoint
    async def hang_on_rank_0(self) -> None:
        await asyncio.sleep(3600 * (self._rank == 0))

    @endpoint
    async def progress(self, seconds: float) -> None:
        began = time.monotonic()
        while self._progressed < began + seconds:
            await asyncio.sleep(0.05)
            self._progressed = time.monotonic()

    @endpoint
    async def idle_s(self) -> float:
        return time.monotonic() - self._progressed

    @endpoint
    async def fail_when_rank_1_is_gone(self, pid: int) -> None:
        with contextlib.suppress(FileNotFoundError):  # Monarch has reaped it
            while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                await asyncio.sleep(0.001)
        raise ConnectionResetError("by peer")

    @endpoint
    async def speak_and_hang(self) -> None:
        print("last words", flush=True)
        await asyncio.sleep(3600)

    @endpoint
    async def meet(self) -> int:
        """Return the sum of all ranks' numbers, by torch.distributed."""
        number = torch.tensor(self._rank)
        await asyncio.to_thread(dist.init_process_group, "gloo")
        await asyncio.to_thread(dist.all_reduce, number)
        return int(number)

    @endpoint
    async def end_a_program(self) -> int:
        """Start a program, send it SIGTERM, and return its exit code."""
        with subprocess.Popen(["sleep", "3600"]) as program:
            program.terminate()
            return program.wait()

    @endpoint
    async def pid(self) -> int:
        return os.getpid()


@contextlib.asynccontextmanager
async def started(
    folder: Path, *, mood: str = "cheerful", heartbeat: float = 0.0, **env: str
) -> AsyncIterator[tuple[ActorGroup, list[int]]]:
    """Yield a group of two ranks and their pids. Assert that the ranks end and files are closed."""
    group = ActorGroup("moody", Place(ranks=2), Hosts(folder), heartbeat=heartbeat)
    pids: list[int] = []
    try:
        await group.spawn(Moody, mood, deadline=LONG, env={"EXTRA": "set", **env})
        pids = [process.pid for process in group._processes]
        yield group, pids
    finally:
        await group.stop()
        await assert_ended(pids)
        assert pidfds() == []


def pidfds() -> list[str]:
    """Return the descriptors of processes that this process has open."""
    links = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread of Monarch has closed it
            links.append(os.readlink(path))
    return [link for link in links if "pidfd" in link]


async def failures_of_all(group, pids, blow) -> list[ActorFailure]:
    """Send a signal to rank 1, or stop the group; return the failures of two pending calls, to
    rank 0 and to both ranks, and of a later call, and that of the group unless it is stopped.
    """
    pending = [
        asyncio.ensure_future(failure_of(group.on(0, timeout_s=3600).call(Moody.hang_on_rank_0))),
        asyncio.ensure_future(failure_of(group.on(timeout_s=3600).call(Moody.speak_and_hang))),
    ]
    failed = asyncio.ensure_future(group.failed())
    while "last words" not in (group.hosts.logs / "moody-1.log").read_text():
        await asyncio.sleep(0.01)
    if blow is None:
        await group.stop()
        assert not failed.done()
        failed.cancel()
    else:
        os.kill(pids[1], blow)
    lost = [] if blow is None else [failed]
    later = failure_of(group.on(0, timeout_s=LONG).call(Moody.pid))
    return [*await asyncio.gather(*pending, *lost), await later]


async def test_calls_return_results_in_rank_order_or_the_exception_of_that_call_alone(tmp_path):
    async with started(tmp_path) as (group, pids):
        said = await group.on(timeout_s=30).call(Moody.say, "hello")
        assert said == ["cheerful hello 0 0/2 set", "cheerful hello 1 1/2 set"]
        said = await group.on(1, timeout_s=30).call(Moody.say, "you")
        assert said == ["cheerful you 1 1/2 set"]
        other = asyncio.ensure_future(group.on(0, timeout_s=3600).call(Moody.hang_on_rank_0))
        failure = await failure_of(group.on(timeout_s=3600).call(Moody.fail_on_rank_1))
        mute = await failure_of(group.on(1, timeout_s=LONG).call(Moody.fail_without_text))
        assert await group.on(timeout_s=LONG).call(Moody.pid) == pids
        assert not other.done()
        other.cancel()
    assert str(failure).startswith("moody rank 1, fail_on_rank_1: ValueError: not today")
    assert "test_group.py" in str(failure)  # the remote traceback
    facts = (failure.actor, failure.rank, failure.call, failure.kind)
    assert facts == ("moody", 1, "fail_on_rank_1", "raised")
    assert not isinstance(failure, RankLost)
    assert str(mute).startswith("moody rank 1, fail_without_text: tests.actors.test_group.Unpr")
    assert (mute.rank, mute.kind) == (1, "raised")


async def test_ranks_rendezvous_when_another_process_wants_their_port(tmp_path):
    async with started(tmp_path) as (group, _):
        with socket.socket() as other:
            with contextlib.suppress(OSError):  # the ranks hold the port
                other.bind(("127.0.0.1", group.port))
                other.listen()
            assert await group.on(timeout_s=LONG).call(Moody.meet) == [1, 1]


async def test_exception_of_a_watched_endpoint_fails_the_group(tmp_path):
    async with started(tmp_path) as (group, _):
        call = group.on(timeout_s=3600).call(Moody.hang_on_rank_0)
        pending = asyncio.ensure_future(failure_of(call))
        group.watch(Moody.fail_on_rank_1)
        later = await group.failed(), await failure_of(group.on(timeout_s=LONG).call(Moody.pid))
        failures = [await pending, *later]
    assert {str(failure) for failure in failures} == {str(failures[0])}
    assert (failures[0].call, failures[0].kind) == ("fail_on_rank_1", "raised")


async def test_silent_rank_fails_the_group_at_the_deadline(tmp_path):
    async with started(tmp_path) as (group, _):
        call = group.on(1, timeout_s=3600).call(Moody.speak_and_hang)
        other = asyncio.ensure_future(failure_of(call))
        await group.on(timeout_s=LONG).call(Moody.pid)  # the actors are built
        failure = await failure_of(group.on(timeout_s=3.0).call(Moody.hang_on_rank_0))
        assert str(failure) == "moody rank 0, hang_on_rank_0: no answer within 3 s"
        assert str(await other) == str(failure)
    assert (failure.kind, type(failure)) == ("silent", RankLost)


async def test_a_call_may_last_while_its_rank_makes_progress(tmp_path):
    async with started(tmp_path) as (group, _):
        rank = replace(group.on(0, timeout_s=1.0), idle=Moody.idle_s)
        await rank.call(Moody.progress, 2.2)
        failure = await failure_of(rank.call(Moody.hang_on_rank_0))
    assert str(failure) == "moody rank 0, hang_on_rank_0: no answer within 1 s"
    assert failure.kind == "silent"


def test_only_the_end_of_a_long_log_is_read(tmp_path):
    log = tmp_path / "moody-0.log"
    log.touch()
    os.truncate(log, 2**40)  # takes no room on the disk
    with open(log, "a") as file:
        file.write("\nlast words\n")
    assert _tail(log).endswith("\nlast words")


def test_a_message_repeats_only_the_begin_of_a_long_line_of_a_log(tmp_path):
    log = tmp_path / "moody-0.log"
    log.write_text(f"{'x' * 10**6}\nlast words\n")
    assert len(_tail(log)) < 1000
    assert _tail(log).endswith("\nlast words")


BLOWS = {
    "killed": (signal.SIGKILL, 0.0, "moody rank 1, speak_and_hang: the process died\nend of "),
    "stopped": (signal.SIGSTOP, 5.0, "moody rank 1, heartbeat: no answer within 5 s"),
    "ended with the group": (None, 0.0, "moody rank 0, stop: it was stopped"),
}


@pytest.mark.parametrize("blow", BLOWS)
async def test_a_lost_rank_fails_every_call_with_its_name_and_a_stop_is_no_failure(tmp_path, blow):
    number, heartbeat, message = BLOWS[blow]
    async with started(tmp_path, heartbeat=heartbeat) as (group, pids):
        failures = await failures_of_all(group, pids, number)
    assert {str(failure) for failure in failures} == {str(failures[0])}
    assert str(failures[0]).startswith(message)
    assert str(failures[0]).endswith("last words") == (blow == "killed")
    assert type(failures[0]) is RankLost
    assert failures[0].kind == ("silent" if blow == "stopped" else "died")


async def test_peer_that_raises_because_of_a_death_is_not_named(tmp_path):
    async with started(tmp_path) as (group, pids):
        call = group.on(0, timeout_s=LONG).call(Moody.fail_when_rank_1_is_gone, pids[1])
        failing = asyncio.ensure_future(failure_of(call))
        process = group._processes[1]
        process._loop.remove_reader(process._descriptor)  # the controller sees the death later
        os.kill(pids[1], signal.SIGKILL)
        await asyncio.sleep(0.3)
        assert not failing.done()
        process._end()
        assert (await failing).kind == "died"


async def test_rank_that_dies_in_its_constructor_is_named(tmp_path):
    async with started(tmp_path, mood="dying") as (group, _):
        failure = await failure_of(group.on(timeout_s=LONG).call(Moody.pid))
    assert str(failure).startswith("moody rank 1, pid: the process died")


@pytest.mark.parametrize("heartbeat", [0.0, LONG])
async def test_the_log_of_a_rank_is_bounded_for_every_heartbeat(tmp_path, monkeypatch, heartbeat):
    monkeypatch.setattr("rl.actors.group.LONGEST_PULSE_S", 0.1)
    async with started(tmp_path, heartbeat=heartbeat) as (group, pids):
        log = tmp_path / "moody-1.log"
        await group.on(timeout_s=LONG).call(Moody.pid)
        os.truncate(log, MOST_LOG_BYTES + 1)
        while not KEPT_LOG_BYTES < log.stat().st_size < KEPT_LOG_BYTES + 1000:
            await asyncio.sleep(0.05)
        assert await group.on(timeout_s=LONG).call(Moody.pid) == pids


async def test_rank_that_is_silent_for_less_than_its_heartbeat_is_alive(tmp_path, monkeypatch):
    monkeypatch.setattr("rl.actors.group.CHECK_ALIVE_S", 0.2)
    async with started(tmp_path, heartbeat=60.0) as (group, pids):
        os.kill(pids[0], signal.SIGSTOP)
        call = group.on(1, timeout_s=LONG).call(Moody.fail_on_rank_1)
        failing = asyncio.ensure_future(failure_of(call))
        await asyncio.sleep(0.6)
        os.kill(pids[0], signal.SIGCONT)
        assert (await failing).kind == "raised"
        assert await group.on(timeout_s=LONG).call(Moody.pid) == pids


async def test_each_session_of_a_process_hears_of_its_own_faults(tmp_path):
    heard = []
    sessions = [Hosts(tmp_path / name) for name in ("first", "second")]
    for number, hosts in enumerate(sessions):
        hosts.report_deaths(f"moody-{number}", lambda *fault, own=number: heard.append(own))
    for number in (0, 1):
        fault = SimpleNamespace(mesh_name=f"moody-{number}-1")
        monarch.actor.unhandled_fault_hook(fault)
        sessions[number].ignore_deaths(f"moody-{number}")
        monarch.actor.unhandled_fault_hook(fault)
    await asyncio.sleep(0)
    assert heard == [0, 1]


async def test_death_on_another_host_fails_only_the_group_that_it_belongs_to(tmp_path, monkeypatch):
    """Monarch reports the death seconds later, after a peer has raised because of it, and may
    report it again. Here its hook is called again with the same faults.
    """

    async def spawned(hosts) -> ActorGroup:
        group = ActorGroup("moody", Place(ranks=2), hosts)
        await group.spawn(Moody, "cheerful", deadline=LONG, env={"EXTRA": ""})
        return group

    hosts = Hosts(tmp_path)
    faults = []
    tell = monarch.actor.unhandled_fault_hook
    monkeypatch.setattr(
        monarch.actor, "unhandled_fault_hook", lambda fault: (faults.append(fault), tell(fault))
    )
    monkeypatch.setattr("rl.actors.group.memory_domain", lambda: "another host")
    lost = await spawned(hosts)
    pids = await lost.on(timeout_s=LONG).call(Moody.pid)
    call = asyncio.ensure_future(
        failure_of(lost.on(0, timeout_s=LONG).call(Moody.fail_when_rank_1_is_gone, pids[1]))
    )
    os.kill(pids[1], signal.SIGKILL)
    failure = await lost.failed()
    assert str(await call) == str(failure)
    await lost.stop()
    await assert_ended(pids)
    again = await spawned(hosts)
    for fault in faults:
        tell(fault)
    await asyncio.sleep(0)
    await again.on(timeout_s=LONG).call(Moody.pid)
    await again.stop()
    assert str(failure).startswith("moody rank 1, between calls: the process died: ")
    reason = str(failure).partition("\nend of ")[0]
    # On a busy host Monarch reports only a crash.
    assert reason.endswith(("Killed(sig=9)", "The process likely crashed"))


def test_ranks_start_though_the_path_of_tmpdir_is_too_long_for_a_socket(tmp_path):
    folder = tmp_path / "long" / ("d" * 75)
    folder.mkdir(parents=True)
    here, there = warm.FORK.Pipe()
    process = warm.FORK.Process(target=greet_from, args=(folder, there), daemon=True)
    process.start()
    there.close()
    with contextlib.suppress(EOFError):  # the ranks died
        assert here.recv() == ["good day 0", "good day 1"]
    process.join()
    assert process.exitcode == 0


def greet_from(folder: Path, pipe: Connection) -> NoReturn:
    """Send what two ranks say if ``folder`` is that of temporary files."""
    os.environ |= {"TMPDIR": str(folder), "EXTRA": ""}
    tempfile.tempdir = None

    async def greet() -> None:
        ensure_runtime(folder / "controller.log")
        group = ActorGroup("moody", Place(ranks=2), Hosts(folder))
        await group.spawn(Moody, "good", deadline=LONG)
        pipe.send(
            [
                said[: len("good day 0")]
                for said in await group.on(timeout_s=LONG).call(Moody.say, "day")
            ]
        )
        await group.stop()

    asyncio.run(greet())
    end_program(0)


def processes_of(pids: list[int], folder: Path) -> set[int]:
    """Return the given ranks, their guards and fork server, and the processes that asked for the
    ranks, which have the log of a rank in ``folder`` among their variables.
    """
    found = {*pids}
    for pid in pids:
        while Path(f"/proc/{pid}/comm").read_text().startswith(("moody-", "guard")):
            pid = parent_of(pid)
            found.add(pid)
    mark = f"{LOG}={folder}/moody-".encode()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended
            found |= {int(path.name)} if mark in (path / "environ").read_bytes() else set()
    return found - {os.getpid()}


@pytest.mark.parametrize(
    ("executed", "env"), [(False, {}), (False, {GUARDED: "1"}), (True, {GUARDED: "1"})]
)
async def test_signals_after_which_a_program_leaves_end_no_other_process(
    executed, env, monkeypatch, tmp_path
):
    if executed:
        monkeypatch.setattr(fork_server, "variables", dict)
    async with started(tmp_path, **env) as (group, pids):
        targets = processes_of(pids, tmp_path)
        for pid in targets:
            for number in LEAVING:
                subprocess.run(["kill", f"-{int(number)}", str(pid)], check=True)
            wait_until_delivered(pid)
        answers = await group.on(timeout_s=LONG).call(Moody.end_a_program) if env else []
        await group.check_alive()
    assert len(targets) == (4 if executed else 5 + 2 * len(env))
    assert answers == [-signal.SIGTERM] * 2 * len(env)


async def test_rank_that_ends_while_its_interpreter_starts_has_died(tmp_path, monkeypatch):
    monkeypatch.setattr(run_hosts, "_WRAPPER", "import sys; sys.exit(3)")
    with pytest.raises(RankLost, match=r"moody rank [01], between calls: the process died"):
        async with started(tmp_path):
            pass


def test_processes_get_the_gpus_that_their_place_sees(monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr(run_hosts, "device_type", lambda: "cuda")
    monkeypatch.setattr(run_hosts, "BootstrapCommand", lambda *parts: parts)
    hosts = Hosts(tmp_path)
    hosts._mesh = SimpleNamespace(spawn_procs=lambda **options: given.append(options))
    hosts.spawn("generator", Place(ranks=2, first_device=4, opened=(0, 4)), env={})
    *_, variables = given[0]["bootstrap_command"](SimpleNamespace(rank=1))
    assert variables["TILLER_DEVICES"] == "4,5,0"


@pytest.mark.parametrize(
    ("visible", "own"), [("", "1,2"), ("4,5,6", "5,6"), ("GPU-a,GPU-b,GPU-c", "GPU-b,GPU-c")]
)
def test_process_gets_devices_among_the_visible_ones(visible, own, tmp_path):
    variables = {
        "TILLER_PARENT": str(os.getpid()),
        "TILLER_LOG": str(tmp_path / "log"),
        "TILLER_DEVICES": "1,2",
    }
    variables |= {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
    program = run_hosts._WRAPPER + run_hosts._EXECUTE
    subprocess.run(
        [sys.executable, "-ISc", program, "/usr/bin/env"], env=variables, check=True, timeout=60
    )
    assert f"CUDA_VISIBLE_DEVICES={own}" in (tmp_path / "log").read_text().splitlines()
