"""Progress of a run, for people."""

import contextlib
import math
import os
import sys
import time
from collections import deque
from itertools import pairwise
from pathlib import Path
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from rl.errors import at_end
from rl.observe.spans import STAGES

BLOCKS = "▁▂▃▄▅▆▇█"
PLAIN_LINE_EVERY_S = 60.0


class Progress:
    """Shows a run as it goes; a context manager around start-up and loop.

    On a terminal two lines that live at its foot: bar, step, ETA; reward, speed and where the time
    goes. Elsewhere a plain line for the first and last step, for every tenth of the run, and after
    every minute without one. ``quiet`` shows nothing but errors. ``log`` gets all plain lines in
    any case, each with the time; one that cannot be written is passed over.
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
        self._rewards: deque[float] = deque(maxlen=1000)
        self._step_seconds: deque[float] = deque(maxlen=20)
        self._updated = self._printed = time.monotonic()
        self._printed_step: int | None = None
        self._spinner = Spinner("dots", style="cyan")
        self._live = Live(console=self.console, get_renderable=self._render, refresh_per_second=8)

    def __enter__(self) -> Self:
        if self._is_live:
            at_end.append(self._show_cursor)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._stage = None
        if self._is_live:
            self._live.stop()

    def stage(self, text: str) -> None:
        """Say what is happening outside the steps, e.g. ``"starting trainer on 4 ranks…"``."""
        self._stage = text
        if self._is_live:
            self._live.refresh()
        self._print(text, when=not self._is_live)

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self._print(text)

    def warn(self, text: str) -> None:
        """Print a line that stays and stands out."""
        self._print(f"warning: {text}", style="yellow")

    def evaluation(self, row: dict[str, float]) -> None:
        """Print what the evaluation of the weights after ``row["step"]`` came to."""
        numbers = {name.removeprefix("eval/"): value for name, value in row.items()}
        others = ("step", "prompts", "lost", "version_min", "version_max", "skipped")
        shown = [f"{name} {value:.3f}" for name, value in numbers.items() if name not in others]
        if lost := numbers.get("lost"):
            shown.append(f"{lost:.0f} rewards failed")
        oldest = numbers.get("version_min", 0)
        newest = numbers.get("version_max", 0)
        if oldest < newest:
            shown.append(f"by policy versions {oldest:.0f} to {newest:.0f}")
        if skipped := numbers.get("skipped"):
            shown.append(f"{skipped:.0f} due before it skipped")
        self.note(" · ".join([f"evaluated after step {row['step']:.0f}", *shown]))

    def error(self, text: str) -> None:
        """Print to standard error, also when quiet."""
        self._live.stop()
        print(text, file=sys.stderr)
        self._write(text)

    def update(self, metrics: dict[str, float]) -> None:
        """Take in the metrics of a step that is done; needs ``step``, shows what else it knows."""
        self._stage = None
        self.step = int(metrics["step"])
        self._metrics = metrics
        self._updated = time.monotonic()
        if math.isfinite(metrics.get("reward/mean", math.nan)):
            self._rewards.append(metrics["reward/mean"])
        if "timing/step" in metrics:
            self._step_seconds.append(metrics["timing/step"])
        if self._is_line_due():
            self._printed = self._updated
            self._printed_step = self.step
            self._print(self._plain_line(), when=not self._is_live)

    def _print(self, text: str, *, style: str = "", when: bool = True) -> None:
        self._write(text)
        if when and not self._quiet:
            self.console.print(Text(text, style=style), soft_wrap=True)

    def _write(self, text: str) -> None:
        if self._log is not None:
            with contextlib.suppress(OSError), self._log.open("a", encoding="utf-8") as log:
                log.write(f"{time.strftime('%F %T')}  {text}\n")

    def _show_cursor(self) -> None:
        os.write(self.console.file.fileno(), b"\x1b[?25h")

    def _is_line_due(self) -> bool:
        if self._printed_step is None or self.step >= self.total_steps:
            return True
        # The run has steps left here, so there is more than none.
        tenth = self.step * 10 // self.total_steps
        is_new_tenth = tenth > self._printed_step * 10 // self.total_steps
        return is_new_tenth or self._updated - self._printed >= PLAIN_LINE_EVERY_S

    def _plain_line(self) -> str:
        parts = [f"step {self.step}/{self.total_steps}", *self._numbers()]
        if where := time_shares(self._metrics):
            parts.append(where)
        if (left := self._seconds_left()) is not None:
            parts.append(f"{duration(left)} left")
        return " · ".join(parts)

    def _numbers(self) -> list[str]:
        shown = [
            ("reward/mean", "reward {:.3f}"),
            ("reward/correct", "correct {:.0%}"),
            ("tokens_per_s", "{:,.0f} tok/s"),
        ]
        return [form.format(self._metrics[name]) for name, form in shown if name in self._metrics]

    def _seconds_left(self) -> float | None:
        if not self._step_seconds or self.step >= self.total_steps:
            return None
        mean = sum(self._step_seconds) / len(self._step_seconds)
        # Counts down between steps, but never past what the steps to come will take.
        since = min(time.monotonic() - self._updated, mean)
        return (self.total_steps - self.step) * mean - since

    def _render(self) -> Group | Text:
        head = Table.grid(padding=(0, 1))
        head.add_row(*self._head())
        if not self._metrics:
            return Group(head)
        return Group(head, self._body())

    def _head(self) -> list:
        if self._stage is not None:
            return [self._spinner, Text(self._stage, style="cyan")]
        bar_width = min(40, max(10, self.console.width - 40))
        cells = [
            ProgressBar(
                total=max(self.total_steps, 1),
                completed=self.step,
                width=bar_width,
                style="bright_black",
                complete_style="cyan",
                finished_style="green",
            ),
            Text.assemble("step ", (f"{self.step}", "bold"), f"/{self.total_steps}"),
        ]
        if (left := self._seconds_left()) is not None:
            cells.append(Text(f"{duration(left)} left", style="dim"))
        return cells

    def _body(self) -> Text:
        reward, *others = self._numbers() or [""]
        line = Text.assemble((reward, "bold green"), " ", (sparkline(self._rewards, 24), "green"))
        tail = [*others, time_shares(self._metrics)]
        line.append(" · ".join(["", *filter(None, tail)]), style="dim")
        line.no_wrap = True
        line.overflow = "ellipsis"
        return line


def sparkline(values: deque[float] | list[float], width: int) -> str:
    """The last of ``values`` as at most ``width`` blocks, from the least to the greatest; old ones
    are averaged.
    """
    values = list(values)
    if not values:
        return ""
    count = min(width, len(values))
    bounds = [len(values) * place // count for place in range(count + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(bounds)]
    low = min(means)
    high = max(means)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((mean - low) * scale)] for mean in means)


def time_shares(metrics: dict[str, float]) -> str:
    """``"generate 52% train 31%"``: shares of ``timing/step``, without those below one percent."""
    step = metrics.get("timing/step", 0.0)
    if not step > 0:
        return ""
    shares = [(name, metrics.get(f"timing/{name}", 0.0) / step) for name in STAGES]
    return " ".join(f"{name} {share:.0%}" for name, share in shares if share >= 0.01)


def duration(seconds: float) -> str:
    """``"8s"``, ``"3m 08s"``, ``"2h 05m"``, ``"3d 04h"``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"
