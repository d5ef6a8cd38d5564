"""Curves and events of a run, kept up to date with its files, which grow line by line."""

import json
import math
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rl.host.disk import end_of

BLOCK = 1 << 25
"""Bytes of lines that are read at once."""
KEPT = 256
"""Bytes before the offset that must still be there; otherwise the file was rewritten."""


class Lines:
    """Whole lines of a file, each of them once; an incomplete last line waits for its end."""

    def __init__(self, path: Path):
        self.path = path
        self.offset = 0
        """End of the lines that were read, in bytes."""
        self._before = b""

    def new(self, forget: Callable[[], None]) -> Iterator[tuple[bytes, int]]:
        """Yield the lines since the last call, each with the offset of its end in bytes.

        If the file was cut or rewritten since, ``forget`` is called, and the lines begin at the
        start of the file.
        """
        while True:
            begin = self.offset
            was_cut, data = self._read()
            if was_cut:
                forget()
                begin = 0
            if not data:
                return
            for line in data.splitlines(keepends=True):
                begin += len(line)
                yield line, begin

    def _read(self) -> tuple[bool, bytes]:
        """Return whether the file was cut or rewritten, and the next whole lines, about BLOCK bytes
        of them.
        """
        was_cut = self.offset > 0
        data = b""
        try:
            with open(self.path, "rb") as file:
                file.seek(self.offset - len(self._before))
                was_cut = file.read(len(self._before)) != self._before
                file.seek(0 if was_cut else self.offset)
                data = part = file.read(BLOCK)
                while len(part) == BLOCK and b"\n" not in part:
                    part = file.read(BLOCK)
                    data += part
        except OSError:
            data = b""
        if was_cut:
            self.offset = 0
            self._before = b""
        data = data[: data.rfind(b"\n") + 1]
        self.offset += len(data)
        self._before = (self._before + data[-KEPT:])[-KEPT:]
        return was_cut, data


def row_of(line: bytes) -> dict[str, Any] | None:
    """Return the object of a line; None if the line has none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def read_json(path: Path) -> Any:
    """Return the content of a file; None if the file is missing or damaged."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def rows_between(path: Path, begin: int, end: int) -> Iterator[dict[str, Any]]:
    """Yield the objects of the lines from offset ``begin`` to ``end``, in bytes."""
    try:
        with open(path, "rb") as file:
            file.seek(begin)
            data = file.read(end - begin)
    except OSError:
        return
    for line in data.splitlines():
        if (row := row_of(line)) is not None:
            yield row


def tail_of(path: Path, size: int) -> str:
    """Return the last ``size`` bytes of a file as text, from the begin of a line on."""
    try:
        data = end_of(path, size + 1)
    except OSError:
        return ""
    if len(data) > size:
        data = data[data.find(b"\n") + 1 :]
    return data.decode(errors="replace")


WARNINGS = ("warning", "lost", "joined", "left", "failed")
KEPT_EVENTS = 300
"""Newest events that pages list."""
SPANS = 4_000
"""Spans of one answer; the longest ones."""


class Curves:
    """Numbers of a file of rows, by name."""

    def __init__(self, path: Path):
        self._lines = Lines(path)
        self._forget()

    def _forget(self) -> None:
        self.steps: dict[str, array] = {}
        self.values: dict[str, array] = {}
        self.last: dict[str, Any] = {}
        self.count = 0

    def update(self) -> None:
        """Read the new rows."""
        for line, _ in self._lines.new(self._forget):
            row = row_of(line)
            if row is None or not isinstance(step := row.get("step"), int):
                continue
            self.last = row
            self.count += 1
            for name, value in row.items():
                if isinstance(value, int | float):
                    if name not in self.values:
                        self.steps[name] = array("q")
                        self.values[name] = array("d")
                    self.steps[name].append(step)
                    self.values[name].append(float(value))

    def thinned(self, name: str, points: int) -> list[list[float]]:
        """Return steps and values with at most ``points`` points: of equal parts of the curve the
        least and the greatest value.
        """
        steps = self.steps.get(name, array("q"))
        values = self.values.get(name, array("d"))
        count = len(values)
        chosen = list(range(count))
        if count > points:
            chosen = []
            parts = max(1, points // 2 - 1)
            for part in range(parts):
                first = part * count // parts
                rows = range(first, (part + 1) * count // parts)
                ends = {min(rows, key=values.__getitem__), max(rows, key=values.__getitem__)}
                chosen += sorted(ends)
            chosen = sorted({0, *chosen, count - 1})
        numbers = [values[row] if math.isfinite(values[row]) else None for row in chosen]
        return [[steps[row] for row in chosen], numbers]  # type: ignore[list-item]


class EventLog:
    """Events of a run. Spans stay in the file; their place in it is kept by step."""

    def __init__(self, path: Path):
        self._lines = Lines(path)
        self._forget()

    def _forget(self) -> None:
        self.starts: list[dict[str, Any]] = []
        self.recent: deque[dict[str, Any]] = deque(maxlen=KEPT_EVENTS)
        self.warnings: deque[dict[str, Any]] = deque(maxlen=KEPT_EVENTS)
        self.time = 0.0
        self.begin = 0.0
        self._ends: dict[int, int] = {}

    def update(self) -> None:
        """Read the new events."""
        for line, end in self._lines.new(self._forget):
            if b'"kind": "span"' in line[:80]:
                continue
            if b'"kind": "metrics"' in line[:80]:
                step = line[:160].partition(b'"step": ')[2].partition(b",")[0]
                if step.isdigit():
                    self._ends[int(step)] = end
            elif (row := row_of(line)) is not None:
                self._add(row, end)

    def _add(self, row: dict[str, Any], offset: int) -> None:
        kind = str(row.get("kind"))
        if isinstance(row.get("time"), int | float):
            self.time = row["time"]
            self.begin = self.begin or self.time
        if kind == "started":
            step = row["step"] if isinstance(row.get("step"), int) else 0
            self.starts.append(row)
            self._ends = {earlier: end for earlier, end in self._ends.items() if earlier <= step}
            self._ends[step] = offset
        if kind in WARNINGS:
            self.warnings.append(row)
        if kind not in ("evaluation", "arrived", "pushed"):
            self.recent.append(row)

    def timeline(self, first: int, last: int) -> dict[str, Any]:
        """Return the spans of the steps ``first`` to ``last``, and the events among them."""
        known = sorted(self._ends)
        before = [self._ends[step] for step in known if step < first]
        after = [self._ends[step] for step in known if step > last]
        begin = before[-1] if before and first > 1 else 0
        end = after[0] if after else self._lines.offset
        spans: list[list[Any]] = []
        marks: list[dict[str, Any]] = []
        for row in rows_between(self._lines.path, begin, end):
            kind = row.get("kind")
            if kind == "started" and len(self.starts) > 1 and row.get("step", 0) < first - 1:
                spans.clear()
                marks.clear()
            has_times = all(isinstance(row.get(name), int | float) for name in ("begin", "end"))
            if kind == "span" and has_times and first <= row.get("step", first) <= last:
                names = (str(row.get("process")), str(row.get("name")))
                spans.append([*names, row["begin"], row["end"], row.get("step")])
            elif kind in ("pushed", "arrived", "checkpoint", "evaluation", *WARNINGS):
                marks.append({name: row[name] for name in row if name != "metrics"})
        cut = max(0, len(spans) - SPANS)
        if cut:
            spans = sorted(spans, key=lambda span: span[2] - span[3])[:SPANS]
        return {"spans": spans, "marks": marks[-500:], "left_out": cut, "steps": [first, last]}
