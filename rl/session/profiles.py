"""Profiles of ranks."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import starmap
from pathlib import Path

from rl.actors.mesh import Mesh, Rank
from rl.errors import RankLost
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

    async def begin(mesh: Mesh, rank: int) -> None:
        with suppress(RankLost):  # the session handles it
            await mesh.on(rank).call(Rank.begin_profile, config.memory)

    async def end(mesh: Mesh, rank: int) -> None:
        with suppress(RankLost):
            path = folder / f"{mesh.name}[{rank}]"
            await mesh.on(rank).call(Rank.end_profile, path, config.memory)

    await asyncio.gather(*starmap(begin, chosen))
    yield
    await asyncio.gather(*starmap(end, chosen))
