"""Concurrent work, and signals between its parts."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


@asynccontextmanager
async def background(*work: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.TaskGroup]:
    """Run ``work`` while the block runs, then cancel it. The block may add tasks to the group.

    The first failure, of the block or the work, ends both and is raised unchanged.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in work]
            yield group
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as failures:
        first = failures.exceptions[0]
        raise first from first.__cause__


async def finish_all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run ``work`` at once, to the end of all parts. Then raise the first failure, if any."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for failure in filter(None, results):
        raise failure


class Signal:
    """Wakes tasks that wait for a condition, so that they check it again."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Wake all waiting tasks."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, condition: Callable[[], object]) -> None:
        """Return when ``condition`` holds. It is checked now and after each ``notify``."""
        while not condition():
            await self._changed.wait()

    async def unless(
        self, condition: Callable[[], object], work: Coroutine[Any, Any, T]
    ) -> T | None:
        """Return the result of ``work``.

        If ``condition`` holds first, cancel the work and return None.
        """
        working = asyncio.ensure_future(work)
        waiting = asyncio.ensure_future(self.until(condition))
        try:
            await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            working.cancel()
            waiting.cancel()
            await asyncio.gather(working, waiting, return_exceptions=True)


class Shares:
    """Room for so much work at once, which clients get by turns. ::

        shares = Shares(lambda: 256)
        async with shares.of("client", 4):
            ...     # takes 4 of the room

    While clients wait, one that has had room goes behind the others. The room may change: work that
    has begun goes on.
    """

    def __init__(self, room: Callable[[], int]):
        self._room = room
        self._taken = 0
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[int]]]] = {}

    @asynccontextmanager
    async def of(self, client: str, size: int) -> AsyncIterator[None]:
        """Take ``size`` of the room, or all of it for larger work, while the block runs. Work of
        one client begins in its order.
        """
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append((size, turn))
        self._begin()
        try:
            await turn
            yield
        finally:
            if not turn.cancelled():
                self._taken -= turn.result()
            self._begin()

    def _begin(self) -> None:
        """Begin what has room, the client first that has waited for the longest time."""
        room = self._room()
        while self._waiting:
            client = next(iter(self._waiting))
            queue = self._waiting[client]
            size, turn = queue[0]
            size = min(size, room)
            if self._taken + size > room and not turn.cancelled():
                return
            queue.popleft()
            del self._waiting[client]
            if queue:
                self._waiting[client] = queue  # behind the others
            if not turn.cancelled():
                self._taken += size
                turn.set_result(size)
