"""A small run that lives by its checkpoints, and the ways in which it is killed."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rl.model.digest import digests
from rl.model.shape import ModelConfig
from rl.step_folders import StepFolders
from tests.training.batches import ragged_batch
from tests.training.disk import checkpointer_of, everything
from tests.training.layouts import LAYOUTS
from tests.training.ranks import Ranks
from tests.training.scenes import engine_of, learn

T = TypeVar("T")

DEADLINE_S = 120.0
# Large enough that a save takes a while, small enough that a step does not.
MODEL = ModelConfig(
    vocab_size=8192, dim=128, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=256, max_seq_len=15
)


@dataclass(frozen=True)
class Plan:
    """A run of ``steps`` optimizer steps, and how it saves."""

    layout: str
    steps: int
    saved_every: int = 2
    async_mode: str = "disabled"

    @property
    def ranks(self) -> int:
        return LAYOUTS[self.layout].ranks


def train(plan: Plan, folder: str, life: int = 0) -> dict[str, Any]:
    """Go on from the newest checkpoint to the last step; what this rank holds in the end."""
    layout = LAYOUTS[plan.layout]
    engine = engine_of(MODEL, folder=folder, layout=layout, warmup=plan.steps, steps=plan.steps)
    checkpointer = checkpointer_of(engine, folder, MODEL, async_mode=plan.async_mode)
    begin = checkpointer.load().get("step", 0)
    note(folder, life=life, resumed_after=begin, ignored=checkpointer.ignored)
    for step in range(begin + 1, plan.steps + 1):
        learn(engine, ragged_batch(seed=step))
        note(folder, step=step)
        if step % plan.saved_every == 0:
            checkpointer.save(step, {"step": step})
    checkpointer.close()
    return {"version": engine.version, "digests": digests(everything(engine).values())}


def note(folder: str, **what: Any) -> None:
    """Rank 0 writes a line that the test reads."""
    if os.environ["RANK"] == "0":
        with (Path(folder) / "notes.jsonl").open("a") as notes:
            notes.write(json.dumps(what) + "\n")


def notes_of(folder: str) -> list[dict[str, Any]]:
    """All whole lines."""
    path = Path(folder) / "notes.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def kill_at(ranks: Ranks, folder: str, step: int, delay: float) -> None:
    """Kill ``delay`` seconds after some life of the run has taken ``step``."""
    _wait(ranks, lambda: any(line.get("step", 0) >= step for line in notes_of(folder)))
    time.sleep(delay)
    ranks.kill()


def kill_in_a_save(ranks: Ranks, folder: str, step: int) -> str | None:
    """Kill while a checkpoint at ``step`` or later is being written; its name, None if it became
    complete.
    """
    folders = StepFolders(Path(folder) / "checkpoints")

    def being_written() -> int | None:
        newest = max(folders.incomplete(), default=0)
        return newest if newest >= max(step, *folders.complete(), 0) else None

    number = _wait(ranks, being_written)
    ranks.kill()
    return folders.name(number) if number in folders.incomplete() else None


def _wait(ranks: Ranks, happened: Callable[[], T]) -> T:
    end = time.monotonic() + DEADLINE_S
    while not (answer := happened()):
        assert ranks.are_alive(), "the run ended before it could be killed"
        assert time.monotonic() < end, "the run came to nothing in time"
        time.sleep(0.001)
    return answer
