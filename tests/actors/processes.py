"""Processes of a mesh, and a check that they end."""

import asyncio
import os
import time
from pathlib import Path
from typing import Any


def pids_of(mesh: Any) -> list[int]:
    return [process.pid for process in mesh._group._processes]


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
