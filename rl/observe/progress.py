"""Progress of a run on terminal and log."""

import contextlib
import math
import os
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any, Self

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from rl.errors import at_end, printable
from rl.observe.events import WARNINGS, Event
from rl.observe.spans import STAGES

BLOCKS = "▁▂▃▄▅▆▇█"
PLAIN_LINE_EVERY_S = 60.0
SCORES = ("eval/exact_match", "eval/reward_mean", "eval/loss")
"""Scores that come first, if a run has them."""
NO_SCORES = ("prompts", "lost", "version_min", "version_max", "skipped", "tokens")
"""Numbers of an evaluation that are not scores, without ``eval/``."""
INTERNAL = (
    *("steps_learned", "policy_version", "policy_digest", "restarts", "ledger"),
    *("eval/version_min", "eval/version_max"),
)
"""Entries of a summary that only its file shows."""


class Progress:
    """Display of a running run. A context manager around start-up and loop.

    A terminal shows two live lines: bar, step and time left; reward, speed and shares of the time.
    Other outputs get a plain line for the first and last step, for every tenth of the run, and
    after every minute without a line. ``quiet`` shows errors only. ``log`` always gets all plain
    lines, each with the time; lines that cannot be written are dropped.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        quiet: bool,
        console: Console | None = None,
        log: Path | None = None,
    ):
        self.total_steps = total_steps
        self.step = 0
        self.console = console or Console(quiet=quiet, highlight=False)
        self._is_live = self.console.is_terminal and not quiet
        self._quiet = quiet
        self._log = log
        self._stage: str | None = "starting…"
        self._metrics: dict[str, float] = {}
        self._headlines: deque[float] = deque(maxlen=1000)
        self._step_seconds: deque[float] = deque(maxlen=20)
        self._updated = self._printed = time.monotonic()
        self._printed_step: int | None = None
        self._spinner = Spinner("dots", style="cyan")
        self._live = Live(console=self.console, get_renderable=self._render, refresh_per_second=8)

    def __enter__(self) -> Self:
        if self._is_live:
            show_cursor = b"\x1b[?25h"
            at_end.append(lambda: os.write(self.console.file.fileno(), show_cursor))
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._stage = None
        if self._is_live:
            self._live.stop()

    def show(self, event: Event) -> None:
        """Show an event of the run: metrics, an evaluation, a warning or a note."""
        kind = event["kind"]
        if kind == "metrics":
            self.update(event["metrics"])
        elif kind == "evaluation":
            self.evaluation({"step": event["step"], **event["metrics"]})
        elif kind in WARNINGS:
            self.warn(event["text"])
        elif kind == "note":
            self.note(event["text"])

    def stage(self, text: str) -> None:
        """Show the current stage outside the steps, e.g. ``"starting trainer on 4 ranks…"``."""
        self._stage = printable(text)
        if self._is_live:
            self._live.refresh()
        self._print(text, when=not self._is_live)

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self._print(text)

    def warn(self, text: str) -> None:
        """Print a line that stays, in another color."""
        self._print(f"warning: {text}", style="yellow")

    def evaluation(self, row: dict[str, float]) -> None:
        """Print the results of the evaluation of the weights after ``row["step"]``."""
        numbers = {name.removeprefix("eval/"): value for name, value in row.items()}
        others = ("step", *NO_SCORES)
        shown = [f"{name} {value:.3f}" for name, value in numbers.items() if name not in others]
        if lost := numbers.get("lost"):
            shown.append(f"{lost:.0f} rewards failed")
        oldest = numbers.get("version_min", 0)
        newest = numbers.get("version_max", 0)
        if oldest < newest:
            shown.append(f"by policy versions {oldest:.0f} to {newest:.0f}")
        if skipped := numbers.get("skipped"):
            shown.append(f"{skipped:.0f} due before it skipped")
        when = f"after step {row['step']:.0f}" if row["step"] else "before the first step"
        self.note(" · ".join([f"evaluated {when}", *shown]))

    def error(self, text: str) -> None:
        """Print to standard error, also if quiet."""
        self._live.stop()
        print(printable(text), file=sys.stderr)
        self._write(text)

    def update(self, metrics: dict[str, float]) -> None:
        """Show the metrics of a finished step. ``step`` is required, other metrics are optional."""
        self._stage = None
        self.step = int(metrics["step"])
        self._metrics = metrics
        self._updated = time.monotonic()
        headline = metrics.get("reward/mean", metrics.get("loss/mean", math.nan))
        if math.isfinite(headline):
            self._headlines.append(headline)
        if "timing/step" in metrics:
            self._step_seconds.append(metrics["timing/step"])
        is_due = self._printed_step is None or self.step >= self.total_steps
        if not is_due:
            steps = (self.step, self._printed_step or 0)
            tenth, printed = (step * 10 // self.total_steps for step in steps)
            is_due = tenth > printed or self._updated - self._printed >= PLAIN_LINE_EVERY_S
        if is_due:
            self._printed = self._updated
            self._printed_step = self.step
            parts = [f"step {self.step}/{self.total_steps}", *self._numbers()]
            parts += [time_shares(metrics), self._time_left()]
            self._print(" · ".join(filter(None, parts)), when=not self._is_live)

    def _print(self, text: str, *, style: str = "", when: bool = True) -> None:
        self._write(text)
        if when and not self._quiet:
            self.console.print(Text(printable(text), style=style), soft_wrap=True)

    def _write(self, text: str) -> None:
        if self._log is not None:
            with contextlib.suppress(OSError), self._log.open("a", encoding="utf-8") as log:
                log.write(f"{time.strftime('%F %T')}  {printable(text)}\n")

    def _numbers(self) -> list[str]:
        headline = "reward" if "reward/mean" in self._metrics else "loss"
        shown = [
            (f"{headline}/mean", f"{headline} {{:.3f}}"),
            ("rewards/accuracy", "accuracy {:.0%}"),
            ("reward/correct", "correct {:.0%}"),
            ("tokens_per_s", "{:,.0f} tok/s"),
        ]
        return [form.format(self._metrics[name]) for name, form in shown if name in self._metrics]

    def _time_left(self) -> str:
        if not self._step_seconds or self.step >= self.total_steps:
            return ""
        mean = sum(self._step_seconds) / len(self._step_seconds)
        # counts down between steps, by one step at most
        since = min(time.monotonic() - self._updated, mean)
        return f"{duration((self.total_steps - self.step) * mean - since)} left"

    def _render(self) -> Group | Text:
        head = Table.grid(padding=(0, 1))
        head.add_row(*self._head())
        if not self._metrics:
            return Group(head)
        reward, *others = self._numbers() or [""]
        others.append(time_shares(self._metrics))
        tail = "".join(f" · {other}" for other in others if other)
        graph = sparkline(self._headlines, 24)
        parts = ((reward, "bold green"), " ", (graph, "green"), (tail, "dim"))
        return Group(head, Text.assemble(*parts, no_wrap=True, overflow="ellipsis"))

    def _head(self) -> list:
        if self._stage is not None:
            return [self._spinner, Text(self._stage, style="cyan")]
        width = min(40, max(10, self.console.width - 40))
        bar = ProgressBar(max(self.total_steps, 1), self.step, width, style="bright_black")
        bar.complete_style = "cyan"
        bar.finished_style = "green"
        step = Text.assemble("step ", (f"{self.step}", "bold"), f"/{self.total_steps}")
        cells = [bar, step]
        if left := self._time_left():
            cells.append(Text(left, style="dim"))
        return cells


def summary_text(summary: dict[str, Any], start: dict[str, float] | None = None) -> str:
    """Return the scores of a summary, one per line, and then its other entries that are not 0 or
    empty.

    ``start`` is the evaluation of the initial weights, whose scores stand beside.
    """
    before = start or {}
    lines = []
    for name in sorted(summary, key=_place):
        text = _readable(summary[name])
        if _is_score(name) and name in before:
            text += f"  ({_readable(before[name])} at the start)"
        if name not in INTERNAL and (_is_score(name) or summary[name]):
            lines.append(f"{name:>18}  {text}")
    return "\n".join(lines)


def _is_score(name: str) -> bool:
    return name.startswith("eval/") and name.removeprefix("eval/") not in NO_SCORES


def _place(name: str) -> tuple[int, bool, bool]:
    """Return the place of an entry in a summary that begins with the scores."""
    place = SCORES.index(name) if name in SCORES else len(SCORES)
    return (place, not _is_score(name), not name.startswith("eval/"))


def _readable(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{count} {name}" for name, count in value.items())
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if value.is_integer() else f"{value:.4g}"


def sparkline(values: deque[float] | list[float], width: int) -> str:
    """Return ``values`` as at most ``width`` blocks, scaled from the minimum to the maximum. Each
    block is the mean of neighbouring values.
    """
    if not values:
        return ""
    parts = np.array_split(values, min(width, len(values)))
    means = [part.mean() for part in parts]
    low = min(means)
    scale = (len(BLOCKS) - 1) / ((max(means) - low) or 1.0)
    return "".join(BLOCKS[round((mean - low) * scale)] for mean in means)


def time_shares(metrics: dict[str, float]) -> str:
    """Return ``"generate 52% train 31%"``: shares of ``timing/step`` of at least one percent; of
    the sum of all stages if that is longer, since stages overlap.
    """
    step = metrics.get("timing/step", 0.0)
    if not step > 0:
        return ""
    spans = [(name, metrics.get(f"timing/{name}", 0.0)) for name in (*STAGES, "evaluate")]
    whole = max(step, sum(seconds for _, seconds in spans))
    shares = [(name, seconds / whole) for name, seconds in spans]
    return " ".join(f"{name} {share:.0%}" for name, share in shares if share >= 0.01)


def duration(seconds: float) -> str:
    """Return a time such as ``"8s"``, ``"3m 08s"``, ``"2h 05m"`` or ``"3d 04h"``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"
