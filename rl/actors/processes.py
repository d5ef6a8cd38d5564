"""Monarch in this process, and the processes that Monarch starts."""

import asyncio
import atexit
import contextlib
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

from monarch.actor import ProcMesh, enable_transport, shutdown_context, this_host

from rl.host.disk import TemporaryFolder
from rl.host.process import allow_open_files

LONGEST_FOLDER = 60
"""Length of a path below which Monarch's sockets fit. The kernel allows 107 bytes for a socket."""

_started: list[Path] = []


def ensure_runtime(log: Path, node: str = "") -> None:
    """Start Monarch in this process unless it runs; Monarch stops when the interpreter ends.

    Monarch's own messages on standard error go to ``log``. Processes of other hosts reach this one
    by the name ``node``, if given. Monarch's sockets are in a folder that ``end_program`` removes,
    in /tmp if the path of TMPDIR is too long for a socket.
    """
    if _started:
        return
    _started.append(log)
    allow_open_files()  # for connections of agents and clients
    log.parent.mkdir(parents=True, exist_ok=True)
    if node:
        enable_transport(f"tcp://{node}:0")
    is_short = len(os.fsencode(tempfile.gettempdir())) <= LONGEST_FOLDER
    sockets = TemporaryFolder("tiller-", None if is_short else Path("/tmp"))
    before = os.environ.get("TMPDIR")
    stderr = os.dup(2)
    with log.open("a") as file:
        os.dup2(file.fileno(), 2)
    os.environ["TMPDIR"] = sockets.name
    try:
        this_host()
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        del os.environ["TMPDIR"]
        if before is not None:
            os.environ["TMPDIR"] = before
    atexit.register(stop_runtime)


def stop_runtime() -> None:
    """Stop Monarch in this process, so that the interpreter can end. Raises nothing."""
    with contextlib.suppress(Exception):  # what remains ends with this process
        shutdown_context().get(timeout=10)


async def stop_procs(procs: ProcMesh | None, *, deadline: float = 20.0) -> None:
    """End the processes, if there are any."""
    if procs is not None:
        with contextlib.suppress(Exception):  # a mesh that has failed raises
            async with asyncio.timeout(deadline):
                await procs.stop()


class Process:
    """A process of this host that Monarch started.

    It is known by a descriptor, since another process may get its pid after its end.
    """

    def __init__(self, pid: int, on_end: Callable[[], None]):
        """Raises ProcessLookupError if the process has ended."""
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._end)
        self.ended: asyncio.Future[None] = self._loop.create_future()

    def kill(self) -> None:
        """End the process, also if it is stopped or hangs."""
        if not self.ended.done():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def _end(self) -> None:
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        self.ended.set_result(None)
        self._on_end()
