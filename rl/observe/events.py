"""Events of a run: one stream for the run folder, the screen and sinks."""

import math
import threading
import time
from collections.abc import Callable
from typing import Any

from rl.errors import printable

Event = dict[str, Any]
"""``time`` in Unix seconds, ``kind``, and the fields of the kind."""

Subscriber = Callable[[Event], None]

WARNINGS = ("warning", "lost", "joined", "left")
"""Kinds of events whose ``text`` is a warning."""


class Events:
    """Stream of what happens in a run. Every subscriber gets every event when it happens. ::

        events = Events(record.write_event, progress.show)
        events.emit("joined", process="generator-1", text="generator-1 has joined")

    =================================  ========================================================
    ``started``                        an attempt that goes on after ``step``; ``host``, ``pid``
    ``span``                           work of ``process``, named ``name``, from ``begin`` to
                                       ``end``, which began in ``step``
    ``metrics``, ``evaluation``        ``metrics`` of ``step``
    ``checkpoint``                     the checkpoint of ``step`` was saved
    ``pushed``                         the trainer published ``version``; ``metrics``
    ``arrived``                        the generator ``process`` loaded ``version``
    ``joined``, ``left``               a generator; ``process``, ``text``
    ``lost``                           a process, which is started again; ``process``, ``text``
    ``warning``, ``note``              ``text``
    ``failed``, ``ended``              the run; ``text``, ``summary``
    =================================  ========================================================

    Times are Unix seconds. An exception of a subscriber is raised by ``emit``. Threads may emit.
    """

    def __init__(self, *subscribers: Subscriber):
        self._subscribers = [*subscribers]
        self._mutex = threading.RLock()

    def subscribe(self, subscriber: Subscriber) -> None:
        """Give ``subscriber`` every event from now on."""
        self._subscribers.append(subscriber)

    def emit(self, kind: str, **fields: Any) -> None:
        """Give every subscriber an event, with the time now."""
        event = {"time": time.time(), "kind": kind, **fields}
        with self._mutex:
            for subscriber in self._subscribers:
                subscriber(event)

    def warn(self, text: str) -> None:
        """Emit a warning."""
        self.emit("warning", text=text)

    def note(self, text: str) -> None:
        """Emit a note."""
        self.emit("note", text=text)


def print_texts(event: Event) -> None:
    """Print the text of an event that is a warning or a note."""
    if event["kind"] in (*WARNINGS, "note"):
        print(printable(event["text"]), flush=True)


def finite(value: Any) -> Any:
    """Return ``value`` with None for every number that is not finite."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
