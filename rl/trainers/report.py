"""Report of each step: to the watchdog, whose alarms name conditions such as stalls and metrics
that are not finite, and to the subscribers of the run's events.
"""

import asyncio
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from math import inf, isfinite, nan
from types import MappingProxyType
from typing import Any

from rl.config import RunConfig, WatchdogConfig
from rl.errors import AlarmRaised
from rl.metrics import Metrics
from rl.observe.checkpoint_folders import StepFolders
from rl.observe.events import Events
from rl.observe.record import RunRecord, failing_loudly, rows_from_end
from rl.observe.spans import Stopwatch
from rl.session.models import StepDigests
from rl.trainers.best import Best

Row = Mapping[str, float]
LEAST = "memory/resident_min"
"""Smallest ``memory/resident`` of the steps so far, which the watchdog adds to a row."""


STEPS = {name: f"{name}_steps" for name in ("zero_std", "vanished", "starving")}
"""Field with the number of consecutive steps that make an alarm, by condition; one step makes an
alarm of other conditions."""
CONDITIONS = (  # causes before effects
    *("non_finite", "parity", "mismatch", "reference", "drift", "entropy", "zero_std", "vanished"),
    *("memory", "starving"),
)
"""Fields of WatchdogConfig with the consequences of what the metrics of a step can show."""


def findings(config: WatchdogConfig, row: Row) -> dict[str, str]:
    """Return what ``row`` shows, with value and limit, by condition; empty for a condition that it
    does not show.
    """

    def above(name: str, limit: float, field: str) -> str:
        """Find a metric above a limit that is not 0."""
        value = row.get(name, nan)
        return f"{name} is {value:.4g}, above watchdog.{field}={limit}" if value > limit > 0 else ""

    infinite = [f"{name} is {value}" for name, value in row.items() if not isfinite(value)]
    texts = {"non_finite": " and ".join(infinite)}
    mismatch_max = config.mismatch_max or 0.0
    texts["mismatch"] = above("logprob/error_mean", mismatch_max, "mismatch_max")
    if config.parity is not None and (count := row.get("logprob/differing_tokens", 0)):
        texts["parity"] = (
            f"logprob/differing_tokens is {count:.0f}, and logprob/error_max "
            f"{row.get('logprob/error_max', nan):.4g}; `python -m rl.compare` names the module"
        )
    reference = above("kl/reference", mismatch_max, "mismatch_max")
    if reference and row.get("step") == 1:
        same = "policy and reference have the same weights in the first step"
        texts["reference"] = f"{reference}; {same}"
    texts["drift"] = above("kl/behaviour", config.drift_max, "drift_max")
    entropy = row.get("entropy/mean", nan)
    texts["entropy"] = above("entropy/mean", config.entropy_max, "entropy_max")
    if entropy < config.entropy_min:
        limit = f"watchdog.entropy_min={config.entropy_min}"
        texts["entropy"] = f"entropy/mean is {entropy:.4g}, below {limit}"
    is_flat = row.get("reward/zero_std_groups") == 1
    if is_flat:
        texts["zero_std"] = "reward/zero_std_groups is 1, so no group had an advantage"
    rates = [value for name, value in row.items() if name.startswith("trainer/lr/")]
    learns = "step" in row and any(rates) and not is_flat  # an update alone has no advantages
    norm = row.get("trainer/grad_norm", nan)
    if learns and row.get("advantage/std") != 0 and row.get("trainer/updates") == 0:
        if norm == 0:
            texts["vanished"] = "trainer/grad_norm is 0, so no weight changed"
        elif isfinite(norm):
            why = "the dtype of the parameters rounded every update away"
            texts["vanished"] = f"trainer/updates is 0: {why}"
    now, least = row.get("memory/resident", nan), row.get(LEAST, nan)
    growth = config.memory_growth
    if now - least > 1 and 0 < growth < now / least - 1:
        texts["memory"] = (
            f"memory/resident is {now:.1f} GiB and was {least:.1f}, a growth above "
            f"watchdog.memory_growth={growth}"
        )
    waited, step = row.get("timing/starved", 0.0), row.get("timing/step", nan)
    if waited > config.starving_share * step:
        limit = f"watchdog.starving_share={config.starving_share}"
        texts["starving"] = f"timing/starved is {waited / step:.0%} of the step, above {limit}"
    return texts


class Watchdog:
    """Checks the metrics of every step, and the time since the last step::

        for alarm in watchdog.check(row):  # after each step; watchdog.stalled(seconds) between
            progress.warn(alarm)
        row |= watchdog.metrics

    An alarm is a text for the screen. An alarm is returned once until its condition has ceased, and
    counted in every step. Both calls raise AlarmRaised, after counting, if the action of the
    condition is ``fail``.
    """

    def __init__(self, config: WatchdogConfig, state: Mapping[str, Any] = MappingProxyType({})):
        """``state`` is what ``to_dict`` returned; empty for a new watchdog."""
        self._config = config
        self._step = 0
        self._counts = dict.fromkeys(("stalled", *CONDITIONS), 0) | state.get("counts", {})
        self._streaks = dict.fromkeys(CONDITIONS, 0) | state.get("streaks", {})
        self._present: set[str] = set()
        self._least = inf  # memory/resident of this attempt

    def check(self, row: Row, updates: Sequence[Row] = ()) -> list[str]:
        """Return the new alarms of a finished step, from its metrics and those of its updates."""
        self._step = int(row["step"])
        self._present.discard("stalled")
        self._least = min(self._least, row.get("memory/resident", inf))
        row = {**row, LEAST: self._least} if isfinite(self._least) else row
        texts = dict[str, str]()  # of the first update that shows it, otherwise of the step
        other = {"parity": ""}  # later updates have other weights than those that drew the tokens
        for number, update in enumerate(updates, start=1):
            place = f"update {number} of {len(updates)}: " if len(updates) > 1 else ""
            shown = findings(self._config, update) | (other if number > 1 else {})
            texts = {name: place + text for name, text in shown.items() if text} | texts
        texts = findings(self._config, row) | (other if len(updates) > 1 else {}) | texts
        alarms = {}
        for name in CONDITIONS:
            finding = texts.get(name, "")
            field = STEPS.get(name, "")
            needed = getattr(self._config, field) if field else 1
            streak = self._streaks[name] = self._streaks[name] + 1 if finding else 0
            if streak < needed:
                self._present.discard(name)
            elif field:
                alarms[name] = f"{finding}, in {streak} steps in a row, watchdog.{field}={needed}"
            else:
                alarms[name] = finding
        return self._alarms(alarms)

    def stalled(self, seconds: float) -> list[str]:
        """Return the alarm if no step finished for too many ``seconds``, once until one does."""
        limit = self._config.stalled_s
        if seconds < limit or "stalled" in self._present:
            return []
        return self._alarms(
            {"stalled": f"no step was done for {seconds:.0f} s, watchdog.stalled_s={limit:g}"}
        )

    @property
    def metrics(self) -> dict[str, float]:
        """Number of alarms of each condition so far, as ``watchdog/NAME``."""
        return {f"watchdog/{name}": float(count) for name, count in self._counts.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, as JSON."""
        return {"counts": dict(self._counts), "streaks": dict(self._streaks)}

    def _alarms(self, findings: dict[str, str]) -> list[str]:
        """Count ``findings``; return the new alarms. Raises AlarmRaised for the action ``fail``."""
        for name in findings:
            self._counts[name] += 1
        new = [name for name in findings if name not in self._present]
        self._present |= findings.keys()
        texts = {
            name: f"step {self._step}: {name}: {finding}" for name, finding in findings.items()
        }
        for name, text in texts.items():
            if getattr(self._config, name) == "fail":
                advice = f"set watchdog.{name} to 'warn' to go on all the same"
                raise AlarmRaised(f"{text}; {advice}", name)
        return [texts[name] for name in new if getattr(self._config, name) == "warn"]


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
    stale: int | None = field(default=None, init=False)
    """Step whose evaluation ends the run early; None if none does."""

    def __post_init__(self) -> None:
        names = self.config.trainer.checkpoint.folder, *({"critic"} & self.config.models().keys())
        folders = [StepFolders(self.record.folder / name) for name in names]
        self.best = Best(self.config.best, folders)
        self._watchdog = Watchdog(self.config.watchdog_limits())

    def resume_after(self, step: int, state: dict[str, Any]) -> None:
        """Forget all rows after ``step``; ``state`` is what ``to_dict`` returned then."""
        self.take_digests()  # of a step that was not finished
        self.record.drop_after(step)
        self.watch.step = step + 1
        self.events.emit("started", step=step, host=socket.gethostname(), pid=os.getpid())
        evaluations = self.record.read_evaluations()
        self.evaluated = max((row["step"] for row in evaluations), default=-1)
        self.best.resume_after(step)
        self.stale = self.best.stale_since(evaluations)
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
        if (peak := self.config.peak_tflops) and "trainer/tflop" in row:
            row["mfu"] = row["trainer/tflop"] / (peak * timings["timing/step"])
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
        self.best.note(step, scores)
        self.events.emit("evaluation", step=step, metrics=scores)
        if self.stale is None:
            self.stale = self.best.stale_since(self.record.read_evaluations())
            if self.stale is not None:
                count = self.config.best.patience
                self.events.note(f"ending early: {count} evaluations without a better one")

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
