"""Report of each step: to the run folder, to the screen and to the watchdog."""

import asyncio
from collections.abc import Sequence
from typing import Any

from rl.config import RunConfig
from rl.metrics import Metrics
from rl.observe.progress import Progress
from rl.observe.record import RunRecord, failing_loudly
from rl.observe.spans import Stopwatch
from rl.trainers.watchdog import Alarm, Watchdog


class Report:
    """The run folder, the screen and the watchdog of a run."""

    def __init__(self, config: RunConfig, record: RunRecord, progress: Progress, watch: Stopwatch):
        self._config = config
        self._record = record
        self._progress = progress
        self._watch = watch
        self._watchdog = Watchdog(config.watchdog)
        self._peak_tflops = config.trainer_tflops
        self.evaluated = 0
        """Step of the newest evaluation on the way; 0 before the first."""
        self._versions: dict[int, int] = {}
        """Policy version after each step."""

    def go_back(self, step: int, state: dict[str, Any]) -> None:
        """Forget all rows after ``step``; ``state`` is what ``to_dict`` returned then."""
        self._record.drop_after(step)
        self.evaluated = max((row["step"] for row in self._record.read_evaluations()), default=0)
        self._versions = {row["step"]: row["policy_version"] for row in self._record.read_metrics()}
        self._watchdog = Watchdog.from_dict(self._config.watchdog, state)

    def to_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON."""
        return self._watchdog.to_dict()

    def step(
        self,
        row: dict[str, float],
        updates: Sequence[Metrics],
        *,
        tokens: int,
    ) -> None:
        """Record a step that was trained by ``updates`` on ``tokens`` tokens.

        Raises RunError for an alarm that ends the run.
        """
        timings = self._watch.lap()
        row |= timings | {"tokens_per_s": tokens / timings["timing/step"]}
        if self._peak_tflops and "trainer/tflop" in row:
            row["mfu"] = row["trainer/tflop"] / (self._peak_tflops * timings["timing/step"])
        self._versions[int(row["step"])] = int(row["policy_version"])
        try:
            self._warn(self._watchdog.check(row, updates))
        finally:  # an alarm that ends the run is in its metrics
            row |= self._watchdog.metrics
            self._record.append_metrics(row)
            self._progress.update(row)

    def version_after(self, step: int) -> int:
        """Return the policy version of the weights after ``step``."""
        return self._versions[step]

    def first_step(self, version: float) -> int:
        """Return the first step after which the policy's version was ``version`` or newer, or 0."""
        return next((step for step, reached in self._versions.items() if reached >= version), 0)

    def evaluation(self, step: int, scores: dict[str, float]) -> None:
        """Record the evaluation of the weights after ``step``."""
        self.evaluated = step
        self._record.append_evaluation({"step": step, **scores})
        self._progress.evaluation({"step": step, **scores})

    def plan(self, text: str) -> None:
        """Record the plan of the weight push."""
        path = self._record.logs / "push.txt"
        with failing_loudly(path):
            path.write_text(text, encoding="utf-8")
        self._progress.note(
            "push over " + ", ".join(text.splitlines()[:2]).removeprefix("transport: ")
        )

    async def look_for_stalls(self) -> None:
        """Check the time since the last step once a second; evaluations do not count."""
        while True:
            await asyncio.sleep(1.0)
            self._warn(self._watchdog.stalled(self._watch.since_lap(without="evaluate")))

    def _warn(self, alarms: list[Alarm]) -> None:
        for alarm in alarms:
            self._progress.warn(alarm.text)
