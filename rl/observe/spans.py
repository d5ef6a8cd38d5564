"""Time of a step, by named spans."""

import time
from collections import Counter, defaultdict
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

    Overlapping spans of one name count once. Spans of several names may overlap, so that their sum
    exceeds ``timing/step``, the wall time since the last lap. ``timing/hidden`` is the time that
    stages ran beside another stage: the sum of the spans of STAGES less the time in which any of
    them ran.
    """

    def __init__(self) -> None:
        self._spans: defaultdict[str, float] = defaultdict(float)
        self._running: Counter[str] = Counter()
        self._hidden = 0.0
        self._started = self._counted = time.perf_counter()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Add the time of this block to span ``name``, also if the block raises."""
        self._count()
        self._running[name] += 1
        try:
            yield
        finally:
            self._count()
            self._running[name] -= 1

    def since_lap(self, *, without: str) -> float:
        """Return the seconds since the last lap, without those of span ``without``."""
        return self._count() - self._started - self._spans[without]

    def lap(self) -> dict[str, float]:
        """Return ``timing/NAME`` of each span since the last lap, ``timing/step`` and
        ``timing/hidden``, in seconds.
        """
        now = self._count()
        timings = {f"timing/{name}": seconds for name, seconds in self._spans.items()}
        timings |= {"timing/step": now - self._started, "timing/hidden": self._hidden}
        self._spans.clear()
        self._hidden = 0.0
        self._started = now
        return timings

    def _count(self) -> float:
        """Add the time since the last count to all running spans. Return the time now."""
        now = time.perf_counter()
        passed = now - self._counted
        self._counted = now
        running = [name for name, count in self._running.items() if count]
        for name in running:
            self._spans[name] += passed
        stages = sum(name in STAGES for name in running)
        self._hidden += max(0, stages - 1) * passed
        return now
