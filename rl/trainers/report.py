"""What each step comes to: written, shown, and looked at by the watchdog."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rl.config import RLConfig
from rl.metrics import Metrics
from rl.observe.progress import Progress
from rl.observe.record import RunRecord, failing_loudly
from rl.observe.spans import Stopwatch
from rl.rollout.metrics import rollout_metrics
from rl.trainers.ledger import Group
from rl.trainers.watchdog import Alarm, Watchdog


class Report:
    """The run folder, the screen and the watchdog of a run."""

    def __init__(self, config: RLConfig, record: RunRecord, progress: Progress, watch: Stopwatch):
        self._config = config
        self._record = record
        self._progress = progress
        self._watch = watch
        self._watchdog = Watchdog(config.watchdog)
        self.evaluated = 0
        """Step of the newest evaluation on the way; 0 before the first."""
        self._versions: dict[int, int] = {}
        """Policy version after each step."""

    def go_back(self, step: int, state: dict[str, Any]) -> None:
        """Forget what came after ``step``; ``state`` is what ``to_dict`` gave then."""
        self._record.drop_after(step)
        self.evaluated = max((row["step"] for row in self._record.read_evaluations()), default=0)
        self._versions = {row["step"]: row["policy_version"] for row in self._record.read_metrics()}
        self._watchdog = Watchdog.from_dict(self._config.watchdog, state)

    def to_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps; JSON-able."""
        return self._watchdog.to_dict()

    def step(
        self,
        row: dict[str, float],
        updates: Sequence[Metrics],
        groups: list[Group],
        ledger: dict[str, Any],
        staleness: Counter[int],
    ) -> None:
        """Record a step that was trained on ``groups`` by ``updates``, with tokens by staleness.

        Raises RunError for what must not go on.
        """
        tokens = staleness.total()
        timings = self._watch.lap()
        row |= rollout_metrics(groups) | timings
        row |= {
            "rollout/staleness_max": max(staleness),
            "rollout/staleness_mean": sum(age * count for age, count in staleness.items()) / tokens,
            "tokens_per_s": tokens / timings["timing/step"],
            **{f"ledger/{name}": count for name, count in ledger.items() if isinstance(count, int)},
        }
        step = int(row["step"])
        each = self._config.rollout.recorded_per_step
        self._versions[step] = int(row["policy_version"])
        rollouts = [rollout for group in groups for rollout in group]
        first = step * each % len(rollouts)  # so that a mixture's tasks all have a turn
        self._record.append_rollouts(step, [*rollouts[first:], *rollouts[:first]][:each])
        self._record.append_ledger({"step": step, **ledger, "staleness": staleness})
        try:
            self._warn(self._watchdog.check(row, updates))
        finally:  # an alarm that ends the run is in its metrics
            row |= self._watchdog.metrics
            self._record.append_metrics(row)
            self._progress.update(row)

    def version_after(self, step: int) -> int:
        """Policy version of the weights after ``step``."""
        return self._versions[step]

    def first_step(self, version: float) -> int:
        """First step after which the policy's version was ``version`` or newer; 0 if none was."""
        return next((step for step, reached in self._versions.items() if reached >= version), 0)

    def evaluation(self, step: int, scores: dict[str, float]) -> None:
        """The weights after ``step`` were evaluated."""
        self.evaluated = step
        self._record.append_evaluation({"step": step, **scores})
        self._progress.evaluation({"step": step, **scores})

    def plan(self, text: str) -> None:
        """How weights travel."""
        path = self._record.logs / "push.txt"
        with failing_loudly(path):
            path.write_text(text, encoding="utf-8")
        self._progress.note(
            "push over " + ", ".join(text.splitlines()[:2]).removeprefix("transport: ")
        )

    async def look_for_stalls(self) -> None:
        """Tell the watchdog the time since the last step, without evaluations, which steps may wait
        for.
        """
        while True:
            await asyncio.sleep(1.0)
            self._warn(self._watchdog.stalled(self._watch.since_lap(without="evaluate")))

    def _warn(self, alarms: list[Alarm]) -> None:
        for alarm in alarms:
            self._progress.warn(alarm.text)
