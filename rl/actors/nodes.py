"""The nodes of a run on several nodes. The launcher starts a worker on each, which writes its
address to a file.
"""

import asyncio
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rl.errors import NodeLost

POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Node:
    """A node with a running worker, which is a process of Monarch."""

    name: str
    """Host name by which other nodes reach this one."""
    address: str
    """Address of the worker."""
    pid: int
    """Process id of the worker."""


class Nodes:
    """Nodes that the environment variable ``TILLER_NODES`` lists; ``TILLER_NODE`` is this one.

    ``folder`` has ``NAME.json`` with a worker's address and pid once the worker listens, and
    ``NAME.ended`` with the reason once the worker has ended. Without these variables the run has
    this host alone.
    """

    def __init__(self, folder: Path):
        self.names = os.environ.get("TILLER_NODES", "").split()
        self.own = os.environ.get("TILLER_NODE", "")
        self._folder = folder

    async def gather(self, count: int, deadline: float) -> list[Node]:
        """Wait until all workers listen, or for ``deadline`` s; return the first ``count`` that do.

        Empty for a run on this host. Raises NodeLost, which names the others, if too few listen.
        """
        ends = time.monotonic() + deadline
        while (missing := self._missing()) and time.monotonic() < ends:
            if all(self._ended(name) for name in missing):
                break
            await asyncio.sleep(POLL_S)
        found = [name for name in self.names if name not in missing]
        if self.names and len(found) < count:
            endings = {name: self._ended(name) for name in missing}
            late = ", ".join(f"{name} (it {how})" if how else name for name, how in endings.items())
            raise NodeLost(
                f"no worker came up within {deadline:.0f} s on {late}; see the log of the node"
            )
        return [Node(name, **json.loads(self._path(name).read_text())) for name in found[:count]]

    async def lost(self, nodes: Sequence[Node]) -> None:
        """Raise NodeLost when the worker of one of ``nodes`` has ended."""
        while True:
            for node in nodes:
                if (how := self._ended(node.name)) is not None:
                    raise NodeLost(f"node {node.name} is lost: its worker {how}")
            await asyncio.sleep(POLL_S)

    def _missing(self) -> list[str]:
        return [name for name in self.names if not self._path(name).exists() or self._ended(name)]

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def _ended(self, name: str) -> str | None:
        path = self._folder / f"{name}.ended"
        return path.read_text() if path.exists() else None
