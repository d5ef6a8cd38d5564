"""Profiles of ranks."""

import asyncio
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rl.actors.mesh import Mesh
from rl.session.recovery import unless_lost


@asynccontextmanager
async def profiled(
    meshes: Iterable[Mesh], ranks: Collection[str], folder: Path, *, memory: bool
) -> AsyncIterator[None]:
    """Record what ``ranks``, such as ``trainer[0]``, compute while the block runs, as files of
    ``folder``: see :mod:`rl.host.profiler`. If the block raises, nothing is written.
    """
    chosen = [
        (mesh, rank)
        for mesh in meshes
        for rank in range(mesh.ranks)
        if f"{mesh.name}[{rank}]" in ranks and mesh.is_running
    ]

    async def call(endpoint: str, mesh: Mesh, rank: int, *args: Any) -> None:
        await unless_lost(mesh, mesh.call(endpoint, *args, memory, rank=rank))

    await asyncio.gather(*(call("begin_profile", *each) for each in chosen))
    yield
    await asyncio.gather(
        *(call("end_profile", *each, folder / f"{each[0].name}[{each[1]}]") for each in chosen)
    )
