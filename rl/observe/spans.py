"""Time of a step, by named spans."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from rl.observe.events import Events

STAGES = ("generate", "score", "train", "push", "checkpoint")
"""Spans that progress and curves show."""

CONTROLLER = "controller"
"""Process whose spans are the metrics ``timing/NAME``."""

SHORTEST_S = 1e-4
"""Shortest span that becomes an event."""


class Stopwatch:
    """Named spans of the processes of a run, in seconds::

        watch = Stopwatch(events)
        with watch.span("generate"):
            ...
        with watch.span("optim_step", "trainer"):
            ...
        metrics.update(watch.lap())  # {"timing/generate": …, "timing/step": …}

    Overlapping spans of one name and process count once. A span that is longer than a lap is cut at
    the end of the lap. Every span becomes an event.

    The spans of the controller are metrics. Those of several names may overlap, so that their sum
    exceeds ``timing/step``, the wall time since the last lap. ``timing/hidden`` is the time that
    stages ran beside another stage: the sum of the spans of STAGES less the time in which any of
    them ran.
    """

    def __init__(self, events: Events | None = None) -> None:
        self.step = 1
        """Number of the step under way, for events."""
        self._events = events or Events()
        self._spans: defaultdict[str, float] = defaultdict(float)
        self._running: Counter[tuple[str, str]] = Counter()
        self._begins: dict[tuple[str, str], float] = {}
        self._own: set[str] = set()  # running spans of the controller
        self._hidden = 0.0
        self._lapped = 1
        self._started = self._counted = time.perf_counter()
        self._epoch = time.time() - self._started

    @contextmanager
    def span(self, name: str, process: str = CONTROLLER) -> Iterator[None]:
        """Record the time of this block as span ``name`` of ``process``, also if the block
        raises.
        """
        key = (process, name)
        is_own = process == CONTROLLER
        now = self._count() if is_own else time.perf_counter()
        if not self._running[key]:
            self._begins[key] = now
            if is_own:
                self._own.add(name)
        self._running[key] += 1
        try:
            yield
        finally:
            now = self._count() if is_own else time.perf_counter()
            self._running[key] -= 1
            if not self._running[key]:
                del self._running[key]
                if is_own:
                    self._own.remove(name)
                self._emit(key, now)

    def worked(self, process: str, name: str, begin: float, end: float) -> None:
        """Record work ``name`` of ``process`` from ``begin`` to ``end``, in Unix seconds, which has
        ended. It may have begun before the last lap.
        """
        if end - begin >= SHORTEST_S:
            step = self.step if begin >= self._epoch + self._started else self._lapped
            self._send(process, name, begin, end, step)

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
        self._lapped = self.step
        for key in [*self._begins]:
            self._emit(key, now)
            self._begins[key] = now
        return timings

    def _emit(self, key: tuple[str, str], now: float) -> None:
        begin = self._begins.pop(key)
        if now - begin >= SHORTEST_S:
            self._send(*key, self._epoch + begin, self._epoch + now, self.step)

    def _send(self, process: str, name: str, begin: float, end: float, step: int) -> None:
        times = {"begin": round(begin, 6), "end": round(end, 6)}
        self._events.emit("span", process=process, name=name, **times, step=step)

    def _count(self) -> float:
        """Add the time since the last count to the controller's running spans. Return the time
        now.
        """
        now = time.perf_counter()
        passed = now - self._counted
        self._counted = now
        for name in self._own:
            self._spans[name] += passed
        stages = sum(name in self._own for name in STAGES)
        self._hidden += max(0, stages - 1) * passed
        return now
