"""Where the time of a step goes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

STAGES = ("generate", "score", "train", "push", "checkpoint")  # the spans that progress and curves show


class Stopwatch:
    """Named spans of one step, in seconds::

        watch = Stopwatch()
        with watch.span("generate"):
            ...
        metrics.update(watch.lap())  # {"timing/generate": …, "timing/step": …}

    Spans of one name add up. Spans may overlap, nest and come from concurrent tasks, so their sum
    may exceed ``timing/step``, the time on the wall since the last lap; ``timing/hidden`` is what
    ran behind another stage: the time that STAGES took together less the time that any of them ran.
    """

    def __init__(self) -> None:
        self._spans: dict[str, float] = {}
        self._running, self._hidden = 0, 0.0
        self._started = self._changed = time.perf_counter()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Add the time this block takes to span ``name``; a block that raises counts too."""
        stage = int(name in STAGES)
        start = self._count(stage)
        try:
            yield
        finally:
            self._spans[name] = self._spans.get(name, 0.0) + self._count(-stage) - start

    def since_lap(self) -> float:
        """Seconds since the last lap."""
        return time.perf_counter() - self._started

    def lap(self) -> dict[str, float]:
        """``timing/NAME`` of spans that ended since the last lap, ``timing/step`` and ``timing/hidden``, in seconds."""
        now = self._count(0)
        timings = {f"timing/{name}": seconds for name, seconds in self._spans.items()}
        timings |= {"timing/step": now - self._started, "timing/hidden": self._hidden}
        self._spans, self._hidden, self._started = {}, 0.0, now
        return timings

    def _count(self, more: int) -> float:
        """The time now, from which on ``more`` stages run."""
        now = time.perf_counter()
        self._hidden += max(0, self._running - 1) * (now - self._changed)
        self._changed = now
        self._running += more
        return now
