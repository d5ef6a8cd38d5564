"""Progress of long reading, shown by the program that waits for it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_listener: ContextVar[Callable[[str], None] | None] = ContextVar("listener", default=None)


def tell_progress(text: str) -> None:
    """Show ``text``, such as "read 2,000 of 9,000 lines", while data is read. Cheap to call."""
    if (listener := _listener.get()) is not None:
        listener(text)


@contextmanager
def showing_progress(listener: Callable[[str], None]) -> Iterator[None]:
    """Pass the texts of :func:`tell_progress` within the block to ``listener``."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
