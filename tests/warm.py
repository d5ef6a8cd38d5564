"""Processes that start warm: forked from one that has imported torch, torchtitan and vLLM.

The imports take more CPU time than most tests. ``Program`` is used like ``subprocess.Popen``: a
warm program has its own session, variables, folder, output and modules of the user, as an executed
one. What only a new interpreter has, such as the order of its imports, needs an executed program.
"""

import ctypes
import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from huggingface_hub import constants

from rl.actors import fork_server
from rl.actors.guard import PR_SET_PDEATHSIG
from rl.cli.program import begin
from rl.errors import end_program
from tests.durations.inject import sitecustomize

ROOT = Path(__file__).parents[1]

# A server that forks must have one thread, or what the others hold breaks; PyTorch and pyarrow's
# allocator start some.
os.environ |= {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
FORK = multiprocessing.get_context("forkserver")
"""Context of the processes that start warm. A process has the variables of the server, not those of
its parent."""
FORK.set_forkserver_preload(
    [
        *fork_server.PRELOADED,
        "rl.cli.arguments",
        "tests.kit.scenes",
        "torchtitan.components.metrics",
        "torchtitan.components.quantization.utils",
        "torchtitan.trainer",  # which Qwen3's config imports late, with pandas and more behind it
        "vllm.v1.engine.llm_engine",
        "vllm.v1.worker.cpu_worker",
        "tests.warm_last",
    ]
)


class Program:
    """One ``python -m MODULE ARGUMENTS``, or ``python SCRIPT.py ARGUMENTS``."""

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        stdout: Path,
        stderr: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
    ):
        self.args = [*map(str, command)]
        for path in (stdout, stderr):
            path.write_text("")  # without the output of an earlier program
        variables = dict(os.environ if env is None else env)
        arguments = self.args, variables, str(cwd), str(stdout), str(stderr)
        self._process = FORK.Process(target=_become, args=arguments)
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def kill_group(self) -> bool:
        """Kill the program and the processes of its group. Return whether there were any."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True


def run(
    *command: str | Path, timeout: float, env: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Return exit code and output of a warm program that leaves no process of its group behind.

    Kills the program after ``timeout`` seconds, and raises subprocess.TimeoutExpired.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        err = Path(folder, "err")
        program = Program(command, stdout=out, stderr=err, env=env, cwd=cwd)
        try:
            program.wait(timeout)
        finally:
            left = program.kill_group()
            program.wait()
        assert not left, "it left processes behind"
        return subprocess.CompletedProcess(
            program.args, program.returncode, out.read_text(), err.read_text()
        )


def _become(
    command: list[str], variables: dict[str, str], folder: str, stdout: str, stderr: str
) -> NoReturn:
    """Run ``command`` in this process as a new interpreter would, then end the process."""
    _end_with_server()
    os.setsid()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    for number, path in enumerate([os.devnull, stdout, stderr]):
        flags = os.O_WRONLY if number else os.O_RDONLY
        descriptor = os.open(path, flags)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None  # read again from the variables
    importlib.reload(constants)
    os.chdir(folder)
    paths = variables.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [
        "",
        *filter(None, paths),
        *(path for path in sys.path if path not in ("", str(ROOT))),
    ]
    name, *arguments = command
    sys.argv[:] = ["-m", *arguments]
    sys.orig_argv[:] = [sys.executable, "-m", *command]
    if sitecustomize.EVENTS in os.environ:
        sitecustomize.log("warm")
    begin()
    fork_server._forget_parent()
    code: int | None = 0
    try:
        if name.endswith(".py"):
            sys.path[0] = str(Path(name).resolve().parent)
            runpy.run_path(name, run_name="__main__")
        else:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    end_program(code)


def _end_with_server() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@cache
def rank_variables() -> dict[str, str]:
    """Return ``fork_server.variables()`` of a server that forks the ranks of this process."""
    here, there = FORK.Pipe()
    FORK.Process(target=_serve_ranks, args=(there,), daemon=True).start()
    there.close()  # so that recv raises EOFError if the server cannot start
    return here.recv()


def _serve_ranks(pipe: Connection) -> NoReturn:
    _end_with_server()
    fork_server.start(preload=False)
    pipe.send(fork_server.variables())
    while True:
        time.sleep(3600)
