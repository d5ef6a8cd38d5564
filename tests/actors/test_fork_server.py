"""A forked rank is like an executed one: variables, output, end and end of its program."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import pytest

from rl.actors import fork_server
from rl.errors import open_file_limits
from tests import warm

ROOT = Path(__file__).parents[2]
ASK = f"import os, sys\n{fork_server.ASK}\nprint('executed')"
WAIT_S = 60.0
NOBODY = 65534


def serve(pipe: Connection) -> NoReturn:
    """Start a fork server, send its name and pid, and wait."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 512), hard))
    fork_server.start(preload=False)
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    pipe.send((fork_server.variables()[fork_server.SERVER], int(children[-1])))
    while True:
        time.sleep(3600)


@contextmanager
def running() -> Iterator[tuple[str, int]]:
    """Run a program with a fork server; yield the server's name and pid."""
    here, there = warm.FORK.Pipe()
    process = warm.FORK.Process(target=serve, args=(there,), daemon=True)
    process.start()
    there.close()  # so that recv raises EOFError if the program ends early
    yield here.recv()
    process.kill()
    process.join()


@pytest.fixture(scope="module")
def server():
    """Name of the server of a program."""
    with running() as (name, _):
        yield name


@pytest.fixture
def ask(server, tmp_path):
    """Start the process that has a rank forked."""
    started = []

    def start(do: str, *, server: str = server, before: str = "", **more: str):
        variables = {fork_server.SERVER: server, "DO": do, "TILLER_LOG": f"{tmp_path}/moody-1.log"}
        process = subprocess.Popen(
            [sys.executable, "-ISc", before + ASK, "tests.actors.forked"],
            cwd=ROOT,
            env=os.environ | variables | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def ended(pid: int) -> bool:
    deadline = time.monotonic() + WAIT_S
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.02)
    return not os.path.exists(f"/proc/{pid}")


def test_forked_rank_is_like_an_executed_one(ask):
    descriptions = []
    for extra in ("x" * 100_000, "\udcff"):
        out, _ = ask("describe", EXTRA=extra).communicate(timeout=WAIT_S)
        descriptions.append(json.loads(out))
        assert descriptions[-1]["variables"]["EXTRA"] == extra
    first, second = descriptions
    assert first["main"] == "tests.actors.forked"
    assert first["folder"] == str(ROOT)
    assert first["name"] == "moody-1"
    assert first["group"]  # signals of the terminal are for the program alone
    assert first["threads"] == 1
    assert first["open_files"] == open_file_limits()[1]
    assert first["random"] != second["random"]


@pytest.mark.parametrize(
    ("do", "more", "code"),
    [
        ("exit", {}, 3),
        ("raise", {}, 1),
        ("die", {"SIGNAL": str(int(signal.SIGKILL))}, -signal.SIGKILL),
        ("die", {"SIGNAL": str(int(signal.SIGSEGV))}, -signal.SIGSEGV),
    ],
)
def test_process_that_monarch_started_ends_as_the_rank_does(ask, do, more, code):
    process = ask(do, **more)
    _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == code
    assert ("ValueError: not today" in errors) == (do == "raise")


def test_rank_without_a_server_is_executed(ask):
    assert ask("exit", server="tiller-none").communicate(timeout=WAIT_S)[0] == "executed\n"


@pytest.mark.parametrize("free", range(4))
def test_a_server_that_cannot_open_files_has_ranks_executed_and_goes_on(ask, free):
    with running() as (name, pid):
        assert ask("exit", server=name).wait(WAIT_S) == 3  # the server has imported all it needs
        used = {int(number) for number in os.listdir(f"/proc/{pid}/fd")}
        limit = [number for number in range(4 + len(used)) if number not in used][free]
        _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, hard))
        process = ask("exit", server=name)
        if free:
            assert process.communicate(timeout=WAIT_S)[0] == "executed\n"
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        assert process.wait(WAIT_S) == (0 if free else 3)
        assert ask("exit", server=name).wait(WAIT_S) == 3


def test_ranks_end_with_their_program(ask):
    with running() as (name, _):
        process = ask("hang", server=name)
        rank = int(process.stdout.readline())
    assert ended(rank)
    assert process.wait(WAIT_S) == -signal.SIGKILL


def test_server_refuses_other_users(ask):
    if os.getuid() != 0:
        pytest.skip("only root can start processes of another user")
    process = ask("exit", before=f"import json, os, signal, socket; os.setuid({NOBODY})\n")
    assert process.wait(WAIT_S) in (1, -signal.SIGKILL)  # the rank would have ended with 3


def test_a_process_forks_one_server_not_beside_threads_which_ends_with_it():
    code = """
import os, threading, time
from rl.actors import fork_server
from rl.errors import at_end

def children():
    return len(open(f"/proc/self/task/{os.getpid()}/children").read().split())

wait = threading.Event()
thread = threading.Thread(target=wait.wait)
thread.start()
fork_server.start(preload=False)
print(fork_server.variables(), children())
wait.set()
while len(os.listdir("/proc/self/task")) > 1:
    time.sleep(0.01)
fork_server.start(preload=False)
first = fork_server.variables()
fork_server.start(preload=False)
print(first == fork_server.variables() != {}, children())
for clean_up in at_end:
    clean_up()
print(children())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=WAIT_S, text=True
    )
    assert done.stdout == "{} 0\nTrue 1\n0\n", done.stderr


def test_programs_have_one_thread_when_they_fork():
    code = f"""
import os, sys
from rl.cli.program import begin
begin()
for module in {fork_server.PRELOADED}:
    __import__(module)
print(len(os.listdir("/proc/self/task")), "monarch" in sys.modules, "vllm" in sys.modules)
"""
    variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=variables, capture_output=True, timeout=WAIT_S
    )
    assert done.stdout.decode() == "1 False False\n"


def test_ranks_and_the_processes_that_monarch_started_end_with_each_other(ask):
    for _ in range(2):
        processes = [ask("hang") for _ in range(8)]
        ranks = [int(process.stdout.readline()) for process in processes]
        processes[0].kill()
        assert ended(ranks[0])
        for process, rank in zip(processes[1:], ranks[1:], strict=True):
            os.kill(rank, signal.SIGKILL)
            process.kill()
        assert all(map(ended, ranks))
    assert ask("exit").wait(WAIT_S) == 3  # the server goes on
