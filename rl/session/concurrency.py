"""Work that goes on side by side, and the conditions that it waits for."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")


@asynccontextmanager
async def background(*work: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.TaskGroup]:
    """Run ``work`` while the block runs, and no longer; the block may add to it.

    What fails first, of the block or the work, ends all of it, and is raised as it is.
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


class Signal:
    """Wakes whoever waits for a condition, so that they look again."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def notify(self) -> None:
        """Something has changed."""
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)

    async def until(self, condition: Callable[[], object]) -> None:
        """Return when ``condition`` holds; it is asked now and after each ``notify``."""
        while not condition():
            changed = asyncio.get_running_loop().create_future()
            self._waiting.add(changed)
            try:
                await changed
            finally:
                self._waiting.discard(changed)

    async def unless(
        self, condition: Callable[[], object], work: Coroutine[Any, Any, T]
    ) -> T | None:
        """Result of ``work``.

        If ``condition`` holds before there is one, cancel the work and return None.
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
