"""Concurrent work, and signals between its parts."""

import asyncio
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
            tasks = [group.create_task(each) for each in work]
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
