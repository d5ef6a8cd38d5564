"""WeightSelector: which weights generators hold, for requests that sample from different ones."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rl.session.concurrency import Signal
from rl.session.push import WeightPush
from rl.training.trainer_config import Source


@dataclass(eq=False)
class _Turn:
    """Blocks that sample from the same weights together."""

    users: int = 0
    begins: asyncio.Task[None] | None = None
    """Change of the weights that the blocks wait for; None for weights that are there."""


class WeightSelector:
    """Has the generators hold one set of weights at a time. ::

        async with serving.of(folder):
            ...     # every generator has the weights of the snapshot in this folder

    - Blocks of the same weights overlap. Others wait until all blocks have ended.
    - Weights get their turn in the order in which they were asked for. All blocks that wait for
      them then begin, and later ones wait again if another turn waits.
    - Blocks of None are for the policy of the last push. Until the first block of other weights, a
      push loads new weights under them.
    """

    def __init__(self, push: WeightPush):
        self._push = push
        self._present = _Turn()
        self._waiting: dict[Source, _Turn] = {}
        self._order = asyncio.Lock()  # fair
        self._changed = Signal()
        self._is_shared = False

    @asynccontextmanager
    async def of(self, source: Source) -> AsyncIterator[None]:
        """Have the generators hold the weights of ``source`` while the block runs.

        Raises the error of their change.
        """
        self._is_shared = self._is_shared or source is not None
        turn = self._turn(source)
        turn.users += 1
        try:
            if turn.begins is not None:
                await asyncio.shield(turn.begins)
            yield
        finally:
            turn.users -= 1
            self._changed.notify()

    async def pull(self, version: int) -> int:
        """Have every generator load ``version`` of the policy, or a newer one; return the oldest
        one loaded. Blocks of other weights end first.
        """
        if not self._is_shared:
            return await self._push.pull(version)
        async with self._order:
            if self._push.state.loaded.source is not None:
                await self._changed.until(lambda: not self._present.users)
            return await self._push.pull(version)

    def _turn(self, source: Source) -> _Turn:
        """Return the turn that a block of ``source`` joins."""
        is_free = not self._waiting and not self._order.locked()
        if is_free and source == self._push.state.loaded.source:
            return self._present
        if source not in self._waiting:
            turn = self._waiting[source] = _Turn()
            turn.begins = asyncio.create_task(self._begin(source, turn))
        return self._waiting[source]

    async def _begin(self, source: Source, turn: _Turn) -> None:
        try:
            async with self._order:
                await self._changed.until(lambda: not self._present.users)
                await self._push.hold(source)
                self._present = turn
        finally:
            del self._waiting[source]
