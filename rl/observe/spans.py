"""Time of a step, by what it was spent on."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

STAGES = ("generate", "score", "train", "push", "checkpoint")
"""Spans that progress and curves show."""


class Stopwatch:
    """Named spans of one step, in seconds::

        watch = Stopwatch()
        with watch.span("generate"):
            ...
        metrics.update(watch.lap())  # {"timing/generate": …, "timing/step": …}

    Spans of one name that overlap count once. Spans of several names may overlap, so that their sum
    exceeds ``timing/step``, the time on the wall since the last lap; ``timing/hidden`` is what ran
    behind another stage: the time that STAGES took together less the time that any of them ran.
    """

    def __init__(self) -> None:
        self._spans: dict[str, float] = {}
        self._running: Counter[str] = Counter()
        self._hidden = 0.0
        self._started = self._counted = time.perf_counter()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Add the time this block takes to span ``name``; a block that raises counts too."""
        self._count()
        self._running[name] += 1
        try:
            yield
        finally:
            self._count()
            self._running[name] -= 1

    def since_lap(self, *, without: str) -> float:
        """Seconds since the last lap, without those of span ``without``."""
        return self._count() - self._started - self._spans.get(without, 0.0)

    def lap(self) -> dict[str, float]:
        """``timing/NAME`` of what ran since the last lap, ``timing/step`` and ``timing/hidden``, in
        seconds.
        """
        now = self._count()
        timings = {f"timing/{name}": seconds for name, seconds in self._spans.items()}
        timings |= {"timing/step": now - self._started, "timing/hidden": self._hidden}
        self._spans = {}
        self._hidden = 0.0
        self._started = now
        return timings

    def _count(self) -> float:
        """Count the time until now for all that runs; the time now."""
        now = time.perf_counter()
        passed = now - self._counted
        self._counted = now
        running = [name for name, count in self._running.items() if count]
        for name in running:
            self._spans[name] = self._spans.get(name, 0.0) + passed
        self._hidden += max(0, len([name for name in running if name in STAGES]) - 1) * passed
        return now
