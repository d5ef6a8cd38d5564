"""Processes of a mesh, a check that they end, and failures of their calls."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from rl.errors import ActorFailure


def pids_of(mesh: Any) -> list[int]:
    return [process.pid for process in mesh._group._processes]


async def failure_of(call: Awaitable[Any]) -> ActorFailure:
    """Return the failure with which a call ends."""
    with pytest.raises(ActorFailure) as error:
        await call
    return error.value


async def assert_ended(pids: list[int]) -> None:
    """Assert that all processes end and leave the process table."""
    async with asyncio.timeout(60):
        while any(os.path.exists(f"/proc/{pid}") for pid in pids):
            await asyncio.sleep(0.02)


def wait_until_delivered(child: int) -> None:
    """Return when the process has handled the signals that it got."""
    status = Path(f"/proc/{child}/status")
    while any(
        int(line.split()[1], 16)
        for line in status.read_text().splitlines()
        if line.startswith(("SigPnd", "ShdPnd"))
    ):
        time.sleep(0.01)
    time.sleep(0.1)  # the interpreter calls the handler a moment later


def stop(pid: int) -> None:
    """Stop a process. Return when all its threads have stopped: until then some may answer."""
    os.kill(pid, signal.SIGSTOP)
    ends = time.monotonic() + 60
    while not _is_stopped(pid):
        assert time.monotonic() < ends, f"process {pid} does not stop"
        time.sleep(0.01)


def _is_stopped(pid: int) -> bool:
    try:
        stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:  # a thread has just ended
        return False
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)
