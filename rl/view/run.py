"""A run folder as the pages see it. Everything is read when a page asks for it."""

import contextlib
import threading
from pathlib import Path
from typing import Any

from rl.errors import require
from rl.observe.events import finite
from rl.observe.owner import read_owner
from rl.view.changes import changes
from rl.view.history import Curves, EventLog
from rl.view.lines import read_json, rows_between, tail_of
from rl.view.rollouts import Rollouts

POINTS = 2_000
"""Most points of a curve of one answer."""
NAMES = 64
"""Most curves of one answer."""
TAIL = 8_000
"""Bytes from the end of each log."""
LOGS = 40
"""Logs on the failure page, newest first."""
FILES = ("config.json", "metrics.jsonl", "events.jsonl")


class Run:
    """Reader of one run folder. Its methods may be called from several threads."""

    def __init__(self, folder: Path):
        """Raise ConfigError if ``folder`` holds no run."""
        require(folder.is_dir(), f"{folder} is no folder; name the folder of a run")
        require(
            any((folder / name).exists() for name in FILES),
            f"{folder} holds no run; it has none of {', '.join(FILES)}. Name the --output-dir of "
            "a run",
        )
        self.folder = folder
        self.name = folder.absolute().name
        self.rollouts = Rollouts(folder)
        self.evaluated = Rollouts(folder, "evaluations")
        self._metrics = Curves(folder / "metrics.jsonl")
        self._evaluations = Curves(folder / "evaluations.jsonl")
        self._events = EventLog(folder / "events.jsonl")
        self._lock = threading.Lock()

    def state(self) -> dict[str, Any]:
        """Return where the run stands, its last metrics and its newest warnings."""
        config = read_json(self.folder / "config.json") or {}
        with self._lock:
            self._metrics.update()
            self._evaluations.update()
            self._events.update()
            metrics, events = self._metrics, self._events
            status, text = self._status(events.time)
            return {
                "name": self.name,
                "folder": str(self.folder.absolute()),
                "status": status,
                "status_text": text,
                "step": metrics.last.get("step", 0),
                "steps": (config.get("config") or {}).get("steps") if config else None,
                "rows": metrics.count + self._evaluations.count,
                "last": metrics.last,
                "names": sorted(name for name in metrics.values if name != "step"),
                "evaluation_names": self._evaluation_names(),
                "warnings": [*events.warnings][-100:],
                "events": [*events.recent][-100:],
                "starts": events.starts,
                "rollout_steps": self.rollouts.steps(),
                "evaluation_steps": self.evaluated.steps(),
                "begin": events.begin,
                "time": events.time,
            }

    def curves(self, names: list[str], points: int = POINTS) -> dict[str, Any]:
        """Return steps and values of each name; names of evaluations begin with ``eval/``."""
        points = min(max(points, 10), POINTS)
        with self._lock:
            self._metrics.update()
            self._evaluations.update()
            final = self._final()
            found = {}
            for name in names[:NAMES]:
                source = self._metrics if name in self._metrics.values else self._evaluations
                steps, values = found[name] = source.thinned(name, points)
                if name in final and max(steps, default=0) < final["steps"]:
                    steps.append(final["steps"])
                    values.append(finite(final[name]))
            return {"curves": found}

    def timeline(self, first: int, count: int) -> dict[str, Any]:
        """Return the spans of ``count`` steps from ``first`` on, and the files of their profiles,
        each with its step.
        """
        count = min(max(count, 1), 50)
        files = [
            (step, path.name)
            for step in range(first, first + count)
            for path in sorted(self.profile(step).glob("[!.]*"))
        ]
        with self._lock:
            self._events.update()
            return self._events.timeline(first, first + count - 1) | {"profiles": files}

    def profile(self, step: int) -> Path:
        """Return the folder of the profile of ``step``, whether it exists or not."""
        return self.folder / "profiles" / f"step-{step}"

    def evaluations(self) -> dict[str, Any]:
        """Return the curves of all numbers of evaluations."""
        with self._lock:
            self._evaluations.update()
            names = self._evaluation_names()
        return self.curves(names, 1_000)

    def _evaluation_names(self) -> list[str]:
        return sorted({*self._evaluations.values, *self._final()} - {"step", "steps"})

    def _final(self) -> dict[str, Any]:
        """Return ``steps`` and the numbers of the evaluation after the last step, which only the
        summary has; empty if the run has no summary.
        """
        summary = read_json(self.folder / "summary.json")
        if not isinstance(summary, dict) or not isinstance(summary.get("steps"), int):
            return {}
        numbers = {name: summary[name] for name in summary if name.startswith("eval/")}
        found = {name: each for name, each in numbers.items() if isinstance(each, int | float)}
        return {"steps": summary["steps"]} | found

    def changes(self, before: int, after: int) -> dict[str, Any]:
        """Return the examples whose result changed between the evaluations of two steps."""
        found = changes(self.evaluated.path(before), self.evaluated.path(after))
        rows = found["rows"]
        for side, step in (("before", before), ("after", after)) if rows else ():
            answers = self.evaluated.last_answers(step, [row[f"index_{side}"] for row in rows])
            for row, text in zip(rows, answers, strict=True):
                row[f"text_{side}"] = row[f"text_{side}"] if text is None else text
        return found

    def failure(self) -> dict[str, Any]:
        """Return what failed, the newest events, the prompts' states and the ends of the logs."""
        with self._lock:
            self._events.update()
            events = [*self._events.recent][-100:]
        folder = self.folder / "logs"
        paths = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
        paths.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        logs = [
            {"name": str(path.relative_to(folder)), "text": tail_of(path, TAIL)}
            for path in paths[:LOGS]
        ]
        path = self.folder / "ledger.jsonl"
        size = path.stat().st_size if path.exists() else 0
        rows = [*rows_between(path, max(0, size - 200_000), size)][-20:]
        for row in rows:  # without their prompt_ids
            row |= {name: len(each) for name, each in row.items() if isinstance(each, list)}
        return {
            "failure": read_json(self.folder / "failure.json"),
            "events": events,
            "ledger": rows,
            "logs": logs,
            "summary": read_json(self.folder / "summary.json"),
        }

    def config(self) -> dict[str, Any]:
        """Return the config as dotted names with values."""
        content = read_json(self.folder / "config.json") or {}
        inner = content.get("config") if isinstance(content, dict) else None
        return {
            "name": _text(content, "name"),
            "command": _text(content, "command"),
            "fields": dict(_flat("", inner if isinstance(inner, dict) else {})),
        }

    def _status(self, last: float) -> tuple[str, str]:
        failure = read_json(self.folder / "failure.json")
        if failure is not None:
            return "failed", _text(failure, "error") or "failure.json has no cause"
        if (self.folder / "summary.json").exists():
            return "done", ""
        with contextlib.suppress(OSError):  # the owner may remove its file
            if read_owner(self.folder)[2]:
                return "running", ""
        if not last and not self._metrics.count:
            return "starting", "no step is recorded yet"
        return "stopped", "no process writes here, and there is no summary"


def _text(content: Any, name: str) -> str:
    value = content.get(name) if isinstance(content, dict) else None
    return value if isinstance(value, str) else ""


def _flat(prefix: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        pairs = [(f"{prefix}.{name}" if prefix else name, each) for name, each in value.items()]
    elif isinstance(value, list) and any(isinstance(each, dict | list) for each in value):
        pairs = [(f"{prefix}.{index}", each) for index, each in enumerate(value)]
    else:
        return [(prefix, value)]
    return [item for name, each in pairs for item in _flat(name, each)]
