"""A run folder as the pages see it. Everything is read when a page asks for it."""

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

from rl.errors import error_text, require
from rl.observe.events import finite
from rl.observe.owner import read_owner
from rl.view.history import Curves, EventLog, read_json, rows_between, tail_of
from rl.view.rollouts import Rollouts, shared_lines, shortened

EXAMPLES = 10_000
"""Rollouts of an evaluation that are compared."""
ROWS = 2_000
"""Changed examples of one answer; those of greedy completions and of large changes come first."""
COLUMNS = ("chunk", "prompt_id", "sample", "task", "reward", "metrics", "prompt", "answer", "text")
KINDS = ("greedy", "sampled")

Key = tuple[Any, ...]
"""Identity of an example: chunk, task, prompt_id, sample and hash of the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """Rollout of an evaluation."""

    index: int
    """Row of the file."""
    reward: float | None
    correct: float | None
    prompt: str
    answer: str
    """Answer that the task expects."""
    text: str


def changes(before: Path, after: Path) -> dict[str, Any]:
    """Return the examples of the files ``before`` and ``after`` whose reward or correctness
    differs, and counts by task.

    An answer with ``error``, which names the file, if a file is missing or damaged.
    """
    examples = []
    for path in (before, after):
        try:
            examples.append(_read(path, path.stat().st_mtime_ns))
        except Exception as error:
            message = f"{path.parent.name}/{path.name} cannot be read: {error_text(error)}"
            return {"error": message, "rows": [], "tasks": []}
    (old, left_before), (new, left_after) = examples
    pairs = {key: (old[key], new[key]) for key in old if key in new}
    rows = sorted(_rows(pairs), key=lambda row: (row["kind"], -abs(row["change"]), row["change"]))
    return {
        "rows": rows[:ROWS],
        "left_out": max(0, len(rows) - ROWS),
        "not_compared": max(left_before, left_after),
        "in_one": len(old) + len(new) - 2 * len(pairs),
        "tasks": [*_by_task(pairs)],
    }


def _rows(pairs: dict[Key, tuple[Example, Example]]) -> Iterator[dict[str, Any]]:
    for (chunk, task, prompt_id, sample, _), (old, new) in pairs.items():
        if (change := _change(old, new)) is not None:
            yield {
                "kind": KINDS[chunk > 0],
                "task": task,
                "prompt_id": prompt_id,
                "sample": sample,
                "prompt": new.prompt,
                "answer": new.answer,
                "change": change,
                "before": old.reward,
                "after": new.reward,
                "text_before": old.text,
                "text_after": new.text,
                "index_before": old.index,
                "index_after": new.index,
            }


def _change(old: Example, new: Example) -> float | None:
    """Return the change of the reward, or of correctness if the rewards are equal; None if both
    are equal.
    """
    if old.reward != new.reward:
        return (new.reward or 0.0) - (old.reward or 0.0)
    if old.correct != new.correct:
        return (new.correct or 0.0) - (old.correct or 0.0)
    return None


def _by_task(pairs: dict[Key, tuple[Example, Example]]) -> Iterator[dict[str, Any]]:
    """Yield the counts of each task, of greedy completions first."""

    def name(key: Key) -> tuple[int, str]:
        return int(key[0] > 0), str(key[1])

    for (kind, task), keys in groupby(sorted(pairs, key=name), key=name):
        both = [pairs[key] for key in keys]
        moves = [_change(old, new) for old, new in both]
        yield {
            "kind": KINDS[kind],
            "task": task,
            "examples": len(both),
            "better": sum(move is not None and move > 0 for move in moves),
            "worse": sum(move is not None and move < 0 for move in moves),
            "before": sum(old.reward or 0.0 for old, _ in both) / len(both),
            "after": sum(new.reward or 0.0 for _, new in both) / len(both),
        }


@lru_cache(maxsize=4)
def _read(path: Path, changed: int) -> tuple[dict[Key, Example], int]:
    """Return the examples of a file, and the number of those that are left out."""
    import pyarrow.parquet as parquet

    file = parquet.ParquetFile(path)
    examples: dict[Key, Example] = {}
    read = 0
    shared: str | None = None
    for batch in file.iter_batches(1_000, columns=[*COLUMNS]):
        if shared is None:  # of the first examples, so that all are shown alike
            shared = shared_lines(batch["prompt"].to_pylist())
        for row in batch.to_pylist():
            key = (row["chunk"], row["task"], row["prompt_id"], row["sample"], hash(row["prompt"]))
            value = json.loads(row["metrics"]).get("correct")
            number = value[0] if isinstance(value, list) else value
            examples[key] = Example(
                index=read,
                reward=finite(row["reward"]),
                correct=(float(number) if isinstance(number, int | float) else None),
                prompt=shortened(row["prompt"], shared),
                answer=shortened(row["answer"]),
                text=shortened(row["text"]),
            )
            read += 1
        if read >= EXAMPLES:
            break
    return examples, file.metadata.num_rows - read


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
        require(folder.is_dir(), f"{folder} is not a folder; name the folder of a run")
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
            curves = {}
            for name in names[:NAMES]:
                source = self._metrics if name in self._metrics.values else self._evaluations
                steps, values = curves[name] = source.thinned(name, points)
                if name in final and max(steps, default=0) < final["steps"]:
                    steps.append(final["steps"])
                    values.append(finite(final[name]))
            return {"curves": curves}

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
        scores = {name: score for name, score in numbers.items() if isinstance(score, int | float)}
        return {"steps": summary["steps"]} | scores

    def changes(self, before: int, after: int) -> dict[str, Any]:
        """Return the examples whose result changed between the evaluations of two steps."""
        changed = changes(self.evaluated.path(before), self.evaluated.path(after))
        rows = changed["rows"]
        for side, step in (("before", before), ("after", after)) if rows else ():
            answers = self.evaluated.last_answers(step, [row[f"index_{side}"] for row in rows])
            for row, text in zip(rows, answers, strict=True):
                row[f"text_{side}"] = row[f"text_{side}"] if text is None else text
        return changed

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
            row |= {name: len(value) for name, value in row.items() if isinstance(value, list)}
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
        pairs = [(f"{prefix}.{name}" if prefix else name, inner) for name, inner in value.items()]
    elif isinstance(value, list) and any(isinstance(inner, dict | list) for inner in value):
        pairs = [(f"{prefix}.{index}", inner) for index, inner in enumerate(value)]
    else:
        return [(prefix, value)]
    return [item for name, inner in pairs for item in _flat(name, inner)]
