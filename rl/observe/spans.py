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
    may exceed ``timing/step``, the time on the wall since the last lap.
    """

    def __init__(self) -> None:
        self._spans: dict[str, float] = {}
        self._started = time.perf_counter()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Add the time this block takes to span ``name``; a block that raises counts too."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._spans[name] = self._spans.get(name, 0.0) + time.perf_counter() - start

    def lap(self) -> dict[str, float]:
        """``timing/NAME`` of every span and ``timing/step`` since the last lap, in seconds; starts the next."""
        now = time.perf_counter()
        timings = {f"timing/{name}": seconds for name, seconds in self._spans.items()}
        timings["timing/step"] = now - self._started
        self._spans, self._started = {}, now
        return timings
