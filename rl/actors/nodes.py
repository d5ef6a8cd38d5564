"""The nodes of a run on several: each has a worker, started by who launches the run, that writes
where it listens.
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
    """One whose worker, a process of Monarch's, is there."""

    name: str
    """By which others reach it."""
    address: str
    """Of the worker."""
    pid: int
    """Of the worker."""


class Nodes:
    """The nodes that the environment names in ``TILLER_NODES``, in order; ``TILLER_NODE`` is this
    one.

    A worker writes ``NAME.json`` to ``folder``, with its address and pid, when it listens, and
    ``NAME.ended`` when it ended, with how. A run without these variables has this host alone.
    """

    def __init__(self, folder: Path):
        self.names = os.environ.get("TILLER_NODES", "").split()
        self.own = os.environ.get("TILLER_NODE", "")
        self._folder = folder

    def gather(self, count: int, deadline: float) -> list[Node]:
        """The first ``count`` in order, once all their workers listen, or after ``deadline`` s of
        those that do.

        Empty for a run on this host. Raises NodeLost, with their names, where too few came up.
        """
        ends = time.monotonic() + deadline
        while (missing := self._missing()) and time.monotonic() < ends:
            if all(self._ended(name) for name in missing):
                break
            time.sleep(POLL_S)
        there = [name for name in self.names if name not in missing]
        if self.names and len(there) < count:
            late = ", ".join(
                f"{name} (it {how})" if (how := self._ended(name)) else name for name in missing
            )
            raise NodeLost(
                f"no worker came up within {deadline:.0f} s on {late}; see the log of the node"
            )
        return [Node(name, **json.loads(self._path(name).read_text())) for name in there[:count]]

    async def lost(self, nodes: Sequence[Node]) -> None:
        """Raise NodeLost once the worker of one of ``nodes`` has ended."""
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
