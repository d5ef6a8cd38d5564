"""kill -9 at any moment, restart: the run ends bit for bit where it would have (C4, C6)."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl.model.digest import digests, merge_digests
from rl.model.shape import ModelConfig
from rl.observe.checkpoint_folders import StepFolders
from tests.kit.batches import ragged_batch
from tests.kit.layouts import LAYOUTS
from tests.kit.ranks import Ranks
from tests.kit.scenes import checkpointer_of, engine_of, everything, learn

DEADLINE_S = 120.0
# Large enough that a save takes a while, small enough that a step does not.
MODEL = ModelConfig(
    vocab_size=8192, dim=128, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=256, max_seq_len=15
)
STEPS = 8


def train(folder: str, life: int = 0) -> dict[str, Any]:
    """Go on from the newest checkpoint to the last step; what this rank holds in the end."""
    place = {"folder": folder, "layout": LAYOUTS["fsdp2"]}
    engine = engine_of(MODEL, warmup=STEPS, steps=STEPS, **place)
    checkpointer = checkpointer_of(engine, folder, MODEL, async_mode="async")
    begin = checkpointer.load().get("step", 0)
    note(folder, life=life, resumed_after=begin, ignored=checkpointer.ignored)
    for step in range(begin + 1, STEPS + 1):
        learn(engine, ragged_batch(seed=step))
        note(folder, step=step)
        if step % 2 == 0:
            checkpointer.save(step, {"step": step})
    checkpointer.close()
    return {"version": engine.version, "digests": digests(everything(engine).values())}


def note(folder: str, **what: Any) -> None:
    """Rank 0 writes a line that the test reads."""
    if os.environ["RANK"] == "0":
        with (Path(folder) / "notes.jsonl").open("a") as notes:
            notes.write(json.dumps(what) + "\n")


def kill_in_a_save(ranks: Ranks, folder: str, step: int) -> str | None:
    """Kill while a checkpoint is being written; its name, None if it became complete."""
    folders = StepFolders(Path(folder) / "checkpoints")

    def being_written() -> int | None:
        newest = max(folders.incomplete(), default=0)
        return newest if newest >= max(step, *folders.complete(), 0) else None

    number = wait_for(ranks, being_written)
    ranks.kill()
    return folders.name(number) if number in folders.incomplete() else None


def wait_for(ranks: Ranks, happened: Callable[[], Any]) -> Any:
    end = time.monotonic() + DEADLINE_S
    while not (answer := happened()):
        assert ranks.are_alive(), "the run ended before it could be killed"
        assert time.monotonic() < end, "the run came to nothing in time"
        time.sleep(0.001)
    return answer


def test_a_killed_run_ends_with_the_same_weights(folder, tmp_path):
    """Each life begins at the newest complete checkpoint and names the incomplete ones."""

    def notes_of(folder: str) -> list[dict[str, Any]]:
        """All whole lines."""
        path = Path(folder) / "notes.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def kill_at(ranks: Ranks, folder: str, step: int, delay: float) -> None:
        """Kill ``delay`` seconds after some life of the run has taken ``step``."""
        wait_for(ranks, lambda: any(line.get("step", 0) >= step for line in notes_of(folder)))
        time.sleep(delay)
        ranks.kill()

    (tmp_path / "whole").mkdir()
    with Ranks(2, train, str(tmp_path / "whole")) as running:
        whole = running.answers(DEADLINE_S)
    folders = StepFolders(Path(folder) / "checkpoints")
    found = []
    for life in range(3):
        incomplete = [folders.name(step) for step in folders.incomplete()]
        found.append((max(folders.complete(), default=0), incomplete))
        with Ranks(2, train, folder, life) as running:
            if life == 0:
                assert kill_in_a_save(running, folder, step=4)
            elif life == 1:
                kill_at(running, folder, step=5, delay=0.02)
            else:
                answers = running.answers(DEADLINE_S)
    assert [answer["version"] for answer in answers] == [STEPS] * 2
    newest = [step for step, _ in found]
    assert sorted(newest) == newest, "a complete checkpoint was lost"
    # except for lives that were too short
    told = [line for line in notes_of(folder) if "life" in line]
    assert told[-1]["life"] == 2
    for line in told:
        assert (line["resumed_after"], line["ignored"]) == found[line["life"]]
    ends, wanted = (
        merge_digests(answer["digests"] for answer in each) for each in (answers, whole)
    )
    assert ends == wanted
