"""Process of a program in the sandbox, from its start to its end: limits, folder, result."""

import contextlib
import marshal
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rl.errors import RunError
from rl.host.disk import TemporaryFolder, remove_tree

START_S = 60.0  # for the launcher, on a host that is busy
END_S = 1.0  # for the kernel, to end killed processes
LOOK_S = 0.05  # between two looks at limits that the kernel does not enforce

MOST_ENTRIES = 2_000  # more files count as a full disk
LAST_LINE = 200  # bytes of standard error in which its last line begins

Limit = Literal["wall", "cpu", "memory", "threads", "disk", "output"]

ENDINGS: dict[str, Limit] = {
    "MemoryError": "memory",
    "OSError: [Errno 27] File too large": "disk",
    "OSError: [Errno 28] No space left": "disk",
    "RuntimeError: can't start new thread": "threads",
}
"""Limits by the exception that ended the program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one program. It is one process: it cannot start others."""

    wall_s: float = 5.0
    """Seconds from the start of the program to its end."""

    cpu_s: int = 2
    """CPU seconds of all its threads together."""

    memory_mib: int = 512
    """Address space. The interpreter itself takes about 40 MiB."""

    threads: int = 16
    """Number of threads, the main thread included."""

    disk_mib: int = 8
    """Size of one file, and of all files of the program together."""

    output_bytes: int = 16_384
    """Bytes of standard output, and of standard error, that are returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """End of a program."""

    exit_code: int
    """Exit status of the program; negative: the signal that ended it."""

    stdout: str
    """Standard output, cut to ``Limits.output_bytes``. Bytes that are not UTF-8 are replaced."""

    stderr: str
    """Standard error, cut in the same way."""

    limit: Limit | None
    """Limit that the program ran into. ``wall`` and ``cpu`` ended it; ``output``: it wrote more
    than is returned. ``memory``, ``threads`` and ``disk`` are mostly derived from the exception
    that ended the program, so that a program can hide or pretend them.
    """

    seconds: float
    """Seconds from the start of the program to its end."""


class SandboxError(RunError):
    """Failure of the sandbox to start a program; not a failure of the program."""


class Program:
    """Running program. A context manager: leaving it ends the program and deletes its files. ::

    with sandbox.start("print(42)") as program:
        result = program.wait()
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        orders: dict[str, Any],
        limits: Limits,
        *,
        fds: Sequence[int],
        environment: Mapping[str, str],
        scratch: bool = False,
    ):
        self._name = name
        self._limits = limits
        self._limit: Limit | None = None
        self._is_running = False
        self._gone = False
        with contextlib.ExitStack() as stack:
            self._scratch = Scratch() if scratch else None
            if self._scratch:
                stack.callback(self._scratch.cleanup)
                stack.callback(remove_tree, Path(self._scratch.name))
            self._stdout = _memory_file(stack)
            self._stderr = _memory_file(stack)
            self._started, started = os.pipe()
            stack.callback(os.close, self._started)
            try:
                stdin = _memory_file(stack, marshal.dumps(orders | {"started": started}))
                self._process = subprocess.Popen(
                    command,
                    stdin=stdin,
                    stdout=self._stdout,
                    stderr=self._stderr,
                    cwd=self._scratch.name if self._scratch else "/",
                    env=dict(environment),
                    pass_fds=(started, *fds),
                    start_new_session=True,
                )
            finally:
                os.close(started)
            stack.callback(self.end)
            self._ending = os.pidfd_open(self._process.pid)
            stack.callback(os.close, self._ending)
            self._resources = stack.pop_all()

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *error: object) -> None:
        self._resources.close()

    def ready(self) -> None:
        """Wait until the program has started. Raises SandboxError if it did not."""
        if not self._is_running:
            is_readable = _wait_readable(self._started, START_S)
            self._is_running = is_readable and os.read(self._started, 1) == b"+"
        if not self._is_running:
            self.end()
            reason = _text(self._stderr, 2000).strip() or f"no start within {START_S:.0f} s"
            raise SandboxError(f"{self._name} could not start a program: {reason}")

    def wait(self, beside: Sequence["Program"] = ()) -> Result:
        """Wait for the end of the program, or end it at a limit; watch limits of the programs
        ``beside`` it too. Raises SandboxError if the program did not start.
        """
        self.ready()
        began = time.monotonic()
        while (pause := self._look(began + self._limits.wall_s, beside)) > 0:
            if _wait_readable(self._ending, pause):
                break
        seconds = time.monotonic() - began
        self.end()
        return self._result(seconds)

    def _look(self, ends: float, beside: Sequence["Program"]) -> float:
        """Return seconds until the next look; 0 if a limit ends the program."""
        left = ends - time.monotonic()
        if left <= 0:
            self._limit = "wall"
            return 0
        for program in beside:
            if program._exceeded():
                program.end()
        self._limit = self._exceeded()
        if self._limit:
            return 0
        return min(left, LOOK_S) if self._scratch or beside else left

    def _exceeded(self) -> Limit | None:
        """Return a limit that the kernel does not enforce and the program exceeds."""
        if self._scratch is None or self._gone:
            return None
        if self._scratch.exceeds(self._limits.disk_mib << 20):
            return "disk"
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        _, _, threads = status.partition("\nThreads:")
        if threads and int(threads.split()[0]) > self._limits.threads:
            return "threads"
        return None

    def end(self) -> None:
        """Kill the program's processes and wait until they have ended."""
        if self._gone:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._gone = True
        while _wait_readable(self._started, END_S) and os.read(self._started, 4096):
            pass  # the last process inside closes the pipe

    def _result(self, seconds: float) -> Result:
        code = self._process.returncode
        if self._scratch is None and code > 128:
            code = 128 - code  # bubblewrap's own process ends like a shell
        most = self._limits.output_bytes
        stderr = _text(self._stderr, most)
        return Result(
            exit_code=code,
            stdout=_text(self._stdout, most),
            stderr=stderr,
            limit=self._limit or self._limit_of(code),
            seconds=seconds,
        )

    def _limit_of(self, code: int) -> Limit | None:
        """Return the limit that the program itself ran into."""
        if code in (-signal.SIGXCPU, -signal.SIGKILL):  # the second if it ignores the first
            return "cpu"
        size = os.fstat(self._stderr).st_size
        last = os.pread(self._stderr, LAST_LINE, max(0, size - LAST_LINE)).decode(errors="replace")
        for ending, limit in ENDINGS.items() if code else ():
            if last.rstrip().rpartition("\n")[2].startswith(ending):
                return limit
        sizes = [os.fstat(file).st_size for file in (self._stdout, self._stderr)]
        return "output" if max(sizes) > self._limits.output_bytes else None


def _memory_file(stack: contextlib.ExitStack, content: bytes = b"") -> int:
    file = os.memfd_create("sandbox")
    stack.callback(os.close, file)
    os.pwrite(file, content, 0)
    return file


def _text(file: int, most: int) -> str:
    return os.pread(file, most, 0).decode(errors="replace")


def _wait_readable(fd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


class Scratch(TemporaryFolder):
    """Empty folder of a program."""

    def __init__(self) -> None:
        super().__init__("tiller-sandbox-")

    def exceeds(self, most: int) -> bool:
        """Whether the files take more than ``most`` bytes of disk, or are too many."""
        size = 0
        entries = 0
        folders = [self.name]
        while folders:
            try:
                listed = list(os.scandir(folders.pop()))
            except OSError:  # removed meanwhile, or closed
                continue
            entries += len(listed)
            for entry in listed:
                try:
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                except OSError:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
            if size > most or entries > MOST_ENTRIES:
                return True
        return False
