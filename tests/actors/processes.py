"""Processes of a mesh, and a check that they end."""

import asyncio
import os
from typing import Any


def pids_of(mesh: Any) -> list[int]:
    return [process.pid for process in mesh._group._processes]


async def assert_ended(pids: list[int]) -> None:
    """Assert that all processes end and leave the process table."""
    async with asyncio.timeout(60):
        while any(os.path.exists(f"/proc/{pid}") for pid in pids):
            await asyncio.sleep(0.02)
