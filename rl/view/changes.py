"""Examples whose result changed between two evaluations."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any

from rl.errors import error_text
from rl.observe.events import finite
from rl.view.rollouts import shortened

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
    found = []
    for path in (before, after):
        try:
            found.append(_read(path, path.stat().st_mtime_ns))
        except Exception as error:
            message = f"{path.parent.name}/{path.name} cannot be read: {error_text(error)}"
            return {"error": message, "rows": [], "tasks": []}
    (old, left_before), (new, left_after) = found
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
    found: dict[Key, Example] = {}
    read = 0
    for batch in file.iter_batches(1_000, columns=[*COLUMNS]):
        for row in batch.to_pylist():
            key = (row["chunk"], row["task"], row["prompt_id"], row["sample"], hash(row["prompt"]))
            value = json.loads(row["metrics"]).get("correct")
            number = value[0] if isinstance(value, list) else value
            found[key] = Example(
                index=read,
                reward=finite(row["reward"]),
                correct=(float(number) if isinstance(number, int | float) else None),
                prompt=shortened(row["prompt"]),
                answer=shortened(row["answer"]),
                text=shortened(row["text"]),
            )
            read += 1
        if read >= EXAMPLES:
            break
    return found, file.metadata.num_rows - read
