"""Report of each step: to the watchdog, and to the subscribers of the run's events."""

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from rl.config import RunConfig
from rl.metrics import Metrics
from rl.observe.events import Events
from rl.observe.record import RunRecord, failing_loudly, rows_from_end
from rl.observe.spans import Stopwatch
from rl.session.models import StepDigests
from rl.trainers.watchdog import Watchdog


@dataclass(eq=False)
class Report:
    """Metrics of each step and evaluation, checked by the watchdog, then emitted as events."""

    config: RunConfig
    record: RunRecord
    events: Events
    watch: Stopwatch
    take_digests: Callable[[], dict[str, list[StepDigests]]] = dict
    """Function that returns the digests of a step by role; {} records none."""
    evaluated: int = field(default=-1, init=False)
    """Step of the newest evaluation on the way; -1 before the first."""

    def __post_init__(self) -> None:
        self._watchdog = Watchdog(self.config.watchdog_limits())
        self._peak_tflops = self.config.trainer_tflops

    def resume_after(self, step: int, state: dict[str, Any]) -> None:
        """Forget all rows after ``step``; ``state`` is what ``to_dict`` returned then."""
        self.take_digests()  # of a step that was not finished
        self.record.drop_after(step)
        self.watch.step = step + 1
        self.events.emit("started", step=step, host=socket.gethostname(), pid=os.getpid())
        self.evaluated = max((row["step"] for row in self.record.read_evaluations()), default=-1)
        self._watchdog = Watchdog(self.config.watchdog_limits(), state)

    def to_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON."""
        return self._watchdog.to_dict()

    def step(self, row: dict[str, float], updates: Sequence[Metrics], *, tokens: int) -> None:
        """Record a step that was trained by ``updates`` on ``tokens`` tokens.

        Raises RunError for an alarm that ends the run.
        """
        timings = self.watch.lap()
        row |= timings | {"tokens_per_s": tokens / timings["timing/step"]}
        if self._peak_tflops and "trainer/tflop" in row:
            row["mfu"] = row["trainer/tflop"] / (self._peak_tflops * timings["timing/step"])
        step = int(row["step"])
        self.watch.step = step + 1
        if digests := self.take_digests():
            self.record.append(self.record.digests_path, {"step": step, **digests})
        try:
            self._warn(self._watchdog.check(row, updates))
        finally:  # an alarm that ends the run is in its metrics
            row |= self._watchdog.metrics
            self.events.emit("metrics", step=step, metrics=row)

    def first_step(self, version: float) -> int:
        """Return the first step after which the policy's version was ``version`` or newer, or 0."""
        rows = rows_from_end(self.record.metrics_path)
        reached = takewhile(lambda row: row["policy_version"] >= version, rows)
        return min((row["step"] for row in reached), default=0)

    def evaluation(self, step: int, scores: dict[str, float]) -> None:
        """Record the evaluation of the weights after ``step``."""
        self.evaluated = step
        self.events.emit("evaluation", step=step, metrics=scores)

    def plan(self, text: str) -> None:
        """Record the plan of the weight push."""
        path = self.record.logs / "push.txt"
        with failing_loudly(path):
            path.write_text(text, encoding="utf-8")
        self.events.note(
            "push over " + ", ".join(text.splitlines()[:2]).removeprefix("transport: ")
        )

    async def look_for_stalls(self) -> None:
        """Check the time since the last step once a second; evaluations do not count."""
        while True:
            await asyncio.sleep(1.0)
            self._warn(self._watchdog.stalled(self.watch.since_lap(without="evaluate")))

    def _warn(self, alarms: list[str]) -> None:
        for alarm in alarms:
            self.events.warn(alarm)
