"""kill -9 at any moment, restart: the run ends bit for bit where it would have (C4, C6)."""

import json
import os
import random
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from rl.model.digest import digests, merge_digests
from rl.model.shape import ModelConfig
from rl.observe.checkpoint_folders import StepFolders
from tests.training.batches import ragged_batch
from tests.training.layouts import LAYOUTS
from tests.training.ranks import Ranks, on_ranks
from tests.training.scenes import checkpointer_of, engine_of, everything, learn

DEADLINE_S = 120.0
# Large enough that a save takes a while, small enough that a step does not.
MODEL = ModelConfig(
    vocab_size=8192, dim=128, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=256, max_seq_len=15
)

Kill = Callable[[Ranks, str], str | None]


def train(
    layout: str, steps: int, mode: str, saved_every: int, folder: str, life: int = 0
) -> dict[str, Any]:
    """Go on from the newest checkpoint to the last step; what this rank holds in the end."""
    place = {"folder": folder, "layout": LAYOUTS[layout]}
    engine = engine_of(MODEL, warmup=steps, steps=steps, **place)
    checkpointer = checkpointer_of(engine, folder, MODEL, async_mode=mode)
    begin = checkpointer.load().get("step", 0)
    note(folder, life=life, resumed_after=begin, ignored=checkpointer.ignored)
    for step in range(begin + 1, steps + 1):
        learn(engine, ragged_batch(seed=step))
        note(folder, step=step)
        if step % saved_every == 0:
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
    wait_for(ranks, lambda: any(line.get("step", 0) >= step for line in notes_of(folder)))
    time.sleep(delay)
    ranks.kill()


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


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Digests of the weights and moments at the end of a run that is not killed."""

    @cache
    def ends(layout: str, steps: int) -> dict[str, str]:
        plan = (layout, steps, "disabled", steps + 1)
        folder = str(tmp_path_factory.mktemp(layout))
        answers = on_ranks(LAYOUTS[layout].ranks, train, *plan, folder, deadline=DEADLINE_S)
        return merge_digests(answer["digests"] for answer in answers)

    return ends


def live_and_die(
    layout: str, steps: int, mode: str, folder: str, kills: list[Kill]
) -> tuple[dict[str, str], list[str]]:
    """(digests after the last life, names of the saves that were killed in the middle).

    Each life must begin at the newest complete checkpoint and name the incomplete ones.
    """
    folders = StepFolders(Path(folder) / "checkpoints")
    count = LAYOUTS[layout].ranks
    found = []
    broken = []
    for life, kill in enumerate([*kills, None]):
        incomplete = [folders.name(step) for step in folders.incomplete()]
        found.append((max(folders.complete(), default=0), incomplete))
        with Ranks(count, train, layout, steps, mode, 2, folder, life) as running:
            if kill is None:
                answers = running.answers(DEADLINE_S)
            else:
                broken.append(kill(running, folder))

    assert [answer["version"] for answer in answers] == [steps] * count
    newest = [step for step, _ in found]
    assert sorted(newest) == newest, "a complete checkpoint was lost"
    # except for lives that were too short
    told = [line for line in notes_of(folder) if "life" in line]
    assert told[-1]["life"] == len(kills)
    for line in told:
        assert (line["resumed_after"], line["ignored"]) == found[line["life"]]
    return merge_digests(answer["digests"] for answer in answers), [name for name in broken if name]


def test_a_killed_run_ends_with_the_same_weights(folder, uninterrupted):
    kills = [partial(kill_in_a_save, step=4), partial(kill_at, step=5, delay=0.02)]
    end, broken = live_and_die("fsdp2", 8, "async", folder, kills)
    assert end == uninterrupted("fsdp2", 8)
    assert broken


@pytest.mark.long
@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize("layout", ["alone", "fsdp2"])
def test_a_run_killed_ten_times_ends_with_the_same_weights(folder, uninterrupted, layout, mode):
    draw = random.Random(f"{layout} {mode}")
    steps = [1 + number + draw.randrange(4) for number in range(10)]
    kills = [
        partial(kill_in_a_save, step=step)
        if number % 3 == 1
        else partial(kill_at, step=step, delay=draw.random() / 10)
        for number, step in enumerate(steps)
    ]
    end, broken = live_and_die(layout, 20, mode, folder, kills)
    assert end == uninterrupted(layout, 20)
    assert broken
