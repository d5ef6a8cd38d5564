"""Alarms for conditions of a run, such as stalls and metrics that are not finite."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan
from types import MappingProxyType
from typing import Any

from rl.config import WatchdogConfig
from rl.errors import AlarmRaised

Row = Mapping[str, float]
LEAST = "memory/resident_min"
"""Smallest ``memory/resident`` of the steps so far, which the watchdog adds to a row."""


@dataclass(frozen=True, slots=True)
class Condition:
    """Condition that the metrics of a step can show."""

    name: str
    """Field of WatchdogConfig with the consequence."""

    found: Callable[[WatchdogConfig, Row], str]
    """Return the finding with value and limit; empty if the row does not show one."""

    steps: str = ""
    """Field with the number of consecutive steps that make an alarm; empty for one step."""


def _non_finite(config: WatchdogConfig, row: Row) -> str:
    return " and ".join(f"{name} is {value}" for name, value in row.items() if not isfinite(value))


def _above(row: Row, name: str, limit: float, field: str) -> str:
    """Find a metric above a limit that is not 0."""
    value = row.get(name, nan)
    return f"{name} is {value:.4g}, above watchdog.{field}={limit}" if value > limit > 0 else ""


def _mismatch(config: WatchdogConfig, row: Row) -> str:
    return _above(row, "logprob/error_mean", config.mismatch_max or 0.0, "mismatch_max")


def _reference(config: WatchdogConfig, row: Row) -> str:
    """Find a reference that is not the initial policy."""
    found = _above(row, "kl/reference", config.mismatch_max or 0.0, "mismatch_max")
    same = "policy and reference have the same weights in the first step"
    return f"{found}; {same}" if found and row.get("step") == 1 else ""


def _drift(config: WatchdogConfig, row: Row) -> str:
    return _above(row, "kl/behaviour", config.drift_max, "drift_max")


def _entropy(config: WatchdogConfig, row: Row) -> str:
    entropy = row.get("entropy/mean", nan)
    if entropy < config.entropy_min:
        return f"entropy/mean is {entropy:.4g}, below watchdog.entropy_min={config.entropy_min}"
    return _above(row, "entropy/mean", config.entropy_max, "entropy_max")


def _zero_std(config: WatchdogConfig, row: Row) -> str:
    is_flat = row.get("reward/zero_std_groups") == 1
    return "reward/zero_std_groups is 1, so no group had an advantage" if is_flat else ""


def _vanished(config: WatchdogConfig, row: Row) -> str:
    """Find a step that changed no weight, although it had advantages and a learning rate."""
    rates = [value for name, value in row.items() if name.startswith("trainer/lr/")]
    had_none = row.get("advantage/std") == 0 or row.get("reward/zero_std_groups") == 1
    is_step = "step" in row  # a single update has no advantages in its row
    norm = row.get("trainer/grad_norm", nan)
    if not is_step or had_none or not any(rates) or row.get("trainer/updates") != 0:
        return ""
    if norm == 0:
        return "trainer/grad_norm is 0, so no weight changed"
    if isfinite(norm):
        return "trainer/updates is 0: the dtype of the parameters rounded every update away"
    return ""


def _memory(config: WatchdogConfig, row: Row) -> str:
    now, least = row.get("memory/resident", nan), row.get(LEAST, nan)
    limit = config.memory_growth
    if now - least <= 1 or not 0 < limit < now / least - 1:
        return ""
    return (
        f"memory/resident is {now:.1f} GiB and was {least:.1f}, a growth above "
        f"watchdog.memory_growth={limit}"
    )


def _starving(config: WatchdogConfig, row: Row) -> str:
    waited = row.get("timing/starved", 0.0)
    step = row.get("timing/step", nan)
    limit = config.starving_share
    if waited > limit * step:
        return (
            f"timing/starved is {waited / step:.0%} of the step, above "
            f"watchdog.starving_share={limit}"
        )
    return ""


CONDITIONS = (  # causes before effects
    Condition("non_finite", _non_finite),
    Condition("mismatch", _mismatch),
    Condition("reference", _reference),
    Condition("drift", _drift),
    Condition("entropy", _entropy),
    Condition("zero_std", _zero_std, "zero_std_steps"),
    Condition("vanished", _vanished, "vanished_steps"),
    Condition("memory", _memory),
    Condition("starving", _starving, "starving_steps"),
)


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
        names = [condition.name for condition in CONDITIONS]
        self._counts = dict.fromkeys(("stalled", *names), 0) | state.get("counts", {})
        self._streaks = dict.fromkeys(names, 0) | state.get("streaks", {})
        self._present: set[str] = set()
        self._least = inf  # memory/resident of this attempt

    def check(self, row: Row, updates: Sequence[Row] = ()) -> list[str]:
        """Return the new alarms of a finished step, from its metrics and those of its updates."""
        self._step = int(row["step"])
        self._present.discard("stalled")
        self._least = min(self._least, row.get("memory/resident", inf))
        row = {**row, LEAST: self._least} if isfinite(self._least) else row
        findings = {}
        for condition in CONDITIONS:
            name = condition.name
            finding = self._found(condition, row, updates)
            needed = getattr(self._config, condition.steps) if condition.steps else 1
            streak = self._streaks[name] = self._streaks[name] + 1 if finding else 0
            if not finding or streak < needed:
                self._present.discard(name)
            elif condition.steps:
                findings[name] = (
                    f"{finding}, in {streak} steps in a row, watchdog.{condition.steps}={needed}"
                )
            else:
                findings[name] = finding
        return self._alarms(findings)

    def _found(self, condition: Condition, row: Row, updates: Sequence[Row]) -> str:
        """Return the finding of the first update with the condition, otherwise of the step."""
        for number, update in enumerate(updates, start=1):
            if finding := condition.found(self._config, update):
                return (
                    f"update {number} of {len(updates)}: {finding}" if len(updates) > 1 else finding
                )
        return condition.found(self._config, row)

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
