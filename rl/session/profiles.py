"""Profiles of ranks."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rl.actors.mesh import Mesh
from rl.session.recovery import unless_lost
from rl.session.session import Session
from rl.session.session_config import ProfileConfig


@asynccontextmanager
async def profiled(session: Session, config: ProfileConfig, folder: Path) -> AsyncIterator[None]:
    """Record what the ranks of ``config`` compute while the block runs, as files of ``folder``: see
    :mod:`rl.host.profiler`. If the block raises, nothing is written.
    """
    chosen = [
        (mesh, rank)
        for mesh in (*session.present.values(), *session.pool.meshes)
        for rank in range(mesh.ranks)
        if f"{mesh.name}[{rank}]" in config.ranks and mesh.is_running
    ]

    async def call(endpoint: str, mesh: Mesh, rank: int, *args: Any) -> None:
        await unless_lost(mesh, mesh.call(endpoint, *args, config.memory, rank=rank))

    await asyncio.gather(*(call("begin_profile", *each) for each in chosen))
    yield
    await asyncio.gather(
        *(call("end_profile", *each, folder / f"{each[0].name}[{each[1]}]") for each in chosen)
    )
