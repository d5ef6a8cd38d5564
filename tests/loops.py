"""Event loops of tests."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

WAIT_S = 120.0


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test on an event loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **fixtures), WAIT_S))

    return run
