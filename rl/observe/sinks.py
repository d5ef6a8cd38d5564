"""Sinks: other places that the events of a run go to."""

import contextlib
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torchtitan.config import Configurable

from rl.errors import error_text, require
from rl.observe.events import Event

WAITING = 10_000
"""Number of events that may wait for a slow sink."""

CLOSE_S = 10.0
"""Time that a sink has to write what waits, and to close."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts about a run that a sink may show."""

    folder: Path
    config: dict[str, Any]
    """The frozen config."""
    step: int
    """Number of completed steps that the attempt goes on from."""


class Sink(Configurable, ABC):
    """Base class of sinks. A subclass, in any package, is a sink of your own::

        class Lines(Sink):
            @dataclass(kw_only=True, slots=True)
            class Config(Sink.Config):
                path: str = "loss.txt"

            def open(self, run):
                self.file = open(run.folder / self.config.path, "a")

            def write(self, event):
                if event["kind"] == "metrics":
                    print(event["step"], event["metrics"]["loss/mean"], file=self.file)

            def close(self):
                self.file.close()

    A sink runs in a thread of its own. A sink that raises is warned of, is closed and gets no more
    events; a sink that is too slow loses events, which is warned of once. Neither ends or delays
    the run. A subclass without a Config of its own is refused when it is defined.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Fields of the sink."""

        def check(self) -> None:
            """Raise ConfigError if the sink cannot work, such as without its package."""

    def __init_subclass__(cls, **options: Any):
        parent = cls.__mro__[1].__name__
        require(
            "Config" in cls.__dict__,
            f"class {cls.__name__} has no Config of its own, so that its config would build "
            f"{parent}",
            fix="write in it: @dataclass(kw_only=True, slots=True) class "
            f"Config({parent}.Config): pass",
        )
        super().__init_subclass__(**options)

    def __init__(self, config: Config):
        self.config = config

    @abstractmethod
    def open(self, run: RunFacts) -> None:
        """Begin an attempt of a run, which goes on after ``run.step``. Called again, after
        ``close``, if the run goes back to a checkpoint.
        """

    @abstractmethod
    def write(self, event: Event) -> None:
        """Write an event: see :class:`rl.observe.events.Events`."""

    @abstractmethod
    def close(self) -> None:
        """Write what waits, and close."""


class Sinks:
    """All sinks of a run, each in a thread. ::

    sinks = Sinks([config.build()], folder, frozen, events.warn)
    events.subscribe(sinks.write)
    sinks.close()
    """

    def __init__(
        self,
        sinks: Sequence[Sink],
        folder: Path,
        config: dict[str, Any],
        warn: Callable[[str], None],
    ):
        self._warn = warn
        facts = partial(RunFacts, folder=folder, config=config)
        self._threads = [_SinkThread(sink, facts, warn) for sink in sinks]

    def write(self, event: Event) -> None:
        """Hand ``event`` to every sink."""
        for thread in self._threads:
            thread.write(event)

    def close(self) -> None:
        """Close every sink, which takes at most CLOSE_S seconds in all."""
        until = time.monotonic() + CLOSE_S
        for sink in self._threads:
            sink.events.put(None)
        for sink in self._threads:
            sink.thread.join(max(0.0, until - time.monotonic()))
            if sink.thread.is_alive():
                sink.is_left = True  # another process may own the run folder soon
                text = f"sink {sink.name} did not close within {CLOSE_S:.0f} s; it is left"
                self._warn(text)


class _SinkThread:
    """Thread of one sink, and the events that wait for it."""

    def __init__(self, sink: Sink, facts: Callable[..., RunFacts], warn: Callable[[str], None]):
        self._sink = sink
        self.name = type(sink).__name__
        self._facts = facts
        self._warn = warn
        self.events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._is_open = False
        self._has_failed = False
        self._has_lost = False
        self.is_left = False
        self.thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self.thread.start()

    def write(self, event: Event) -> None:
        if self._has_failed:
            return
        if self.events.qsize() < WAITING:
            self.events.put(event)
        elif not self._has_lost:
            self._has_lost = True
            self._warn(f"sink {self.name} is too slow and loses events; the run goes on")

    def _run(self) -> None:
        try:
            while (event := self.events.get()) is not None:
                if event["kind"] == "started":
                    self._close()
                    self._sink.open(self._facts(step=event["step"]))
                    self._is_open = True
                if self._is_open:
                    self._sink.write(event)
            self._close()
        except Exception as error:  # the user's code, or another library
            self._has_failed = True
            if not self.is_left:
                self._warn(f"sink {self.name} gets no more events: {error_text(error)}")
            with contextlib.suppress(Exception):  # it has been warned of
                self._close()

    def _close(self) -> None:
        """Close the sink if it is open. It is not closed twice, also if it raises."""
        if self._is_open:
            self._is_open = False
            self._sink.close()
