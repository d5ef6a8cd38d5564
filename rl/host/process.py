"""Streams, signals and garbage collection of this process."""

import io
import os
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TextIO

from rl.errors import open_file_limits

LEAVING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals after which a program saves and leaves. The other processes of a run ignore the signals,
since a launcher, a closing terminal or a user may send them to all processes."""

"""Maximum number of open files that a process asks for; some programs visit all numbers."""

COLLECT_AT = (50_000, 20, 100)
"""Thresholds of the garbage collector. Python's own make it visit the objects of imports again and
again, which is an eighth of the CPU time of a start."""


def without_proxy() -> dict[str, str]:
    """Return the environment variables by which HTTP clients reach this host without a proxy, and
    all hosts that the user excludes from the proxy.
    """
    names = ("NO_PROXY", "no_proxy")
    known = ",".join(os.environ.get(name, "") for name in names).split(",")
    hosts = [*filter(None, map(str.strip, known)), "127.0.0.1", "localhost"]
    return dict.fromkeys(names, "*" if "*" in hosts else ",".join(dict.fromkeys(hosts)))


class Signals:
    """Handlers of LEAVING inside a ``with`` block in a coroutine. ::

        with Signals(first=task.cancel, again=lambda number: end_program(128 + number)) as signals:
            ...
        signals.name  # such as "SIGTERM"; empty before the first

    ``first`` is called in the event loop, ``again`` at once and with the number of each later
    signal. Signals that were ignored when the program started stay ignored: SIGHUP under nohup(1),
    SIGINT in a background job of a script. In a thread other than the main one the block does
    nothing, since Python handles signals in the main thread alone.
    """

    def __init__(self, first: Callable[[], object], again: Callable[[int], object]):
        self.name = ""
        """Name of the first signal; empty before it."""
        self._first = first
        self._again = again
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        from asyncio import get_running_loop  # only here, since a start is quick

        self._loop = get_running_loop()
        if threading.current_thread() is threading.main_thread():
            for number in LEAVING:
                if signal.getsignal(number) != signal.SIG_IGN:
                    # the loop's own handlers wait for a step that blocks the loop
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: object) -> None:
        if self.name or self._loop.is_closed():
            self._again(number)
        else:
            self.name = signal.Signals(number).name
            self._loop.call_soon_threadsafe(self._first)


def oom_kills() -> int:
    """Return the number of processes that the kernel of this host has ended for lack of memory
    since its boot; 0 if the kernel does not count them.
    """
    counts = Path("/proc/vmstat")
    rows = (line.split() for line in counts.read_text().splitlines()) if counts.exists() else ()
    return next((int(row[1]) for row in rows if row[0] == "oom_kill"), 0)


def allow_open_files() -> int:
    """Raise this process's limit of open files, which the processes that it starts inherit, as far
    as the host allows. Return the limit.
    """
    limit, most = open_file_limits()
    if limit < most:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def steady(stream: TextIO | None, number: int) -> TextIO:
    """Return a stream like ``stream`` that writes to descriptor ``number`` and never raises.

    Output that cannot be written is dropped: the pipe is closed, the disk is full or the terminal
    is lost. Characters that the encoding lacks are replaced.
    """
    raw = _Lossy(number, "w", closefd=False)
    through = stream is not None and getattr(stream, "write_through", False)
    return io.TextIOWrapper(
        raw if through else io.BufferedWriter(raw),  # type: ignore[type-var]
        encoding=stream.encoding if stream else "utf-8",
        errors="plain",
        line_buffering=stream is None or bool(stream.line_buffering),
        write_through=through,
    )


class _Lossy(io.FileIO):
    def write(self, data: bytes) -> int:  # type: ignore[override]
        try:
            written = super().write(data)
        except OSError:
            written = None
        return len(data) if written is None else written
