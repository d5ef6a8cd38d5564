"""kill -9 at any moment, restart: the run ends bit for bit where the uninterrupted one does (C4,
C6).
"""

import random
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest

from rl.model.digest import merge_digests
from rl.step_folders import StepFolders
from tests.training.killing import DEADLINE_S, Plan, kill_at, kill_in_a_save, notes_of, train
from tests.training.ranks import Ranks, on_ranks

Kill = Callable[[Ranks, str], str | None]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Digests of the weights and moments that a run ends with which is not killed, and saves
    nothing.
    """

    @cache
    def ends(layout: str, steps: int) -> dict[str, str]:
        plan = Plan(layout, steps, saved_every=steps + 1)
        answers = on_ranks(
            plan.ranks, train, plan, str(tmp_path_factory.mktemp(layout)), deadline=DEADLINE_S
        )
        return merge_digests(answer["digests"] for answer in answers)

    return ends


def live_and_die(plan: Plan, folder: str, kills: list[Kill]) -> tuple[dict[str, str], list[str]]:
    """(digests after the last life, names of the saves that were killed in the middle).

    Each life must begin at the newest complete checkpoint and name the incomplete ones.
    """
    folders = StepFolders(Path(folder) / "checkpoints")
    found = []
    broken = []
    for life, kill in enumerate([*kills, None]):
        found.append(
            (
                max(folders.complete(), default=0),
                [folders.name(step) for step in folders.incomplete()],
            )
        )
        with Ranks(plan.ranks, train, plan, folder, life) as running:
            if kill is None:
                answers = running.answers(DEADLINE_S)
            else:
                broken.append(kill(running, folder))

    assert [answer["version"] for answer in answers] == [plan.steps] * plan.ranks
    newest = [step for step, _ in found]
    assert sorted(newest) == newest, "a complete checkpoint was lost"
    told = [
        line for line in notes_of(folder) if "life" in line
    ]  # except for lives that were too short
    assert told[-1]["life"] == len(kills)
    for line in told:
        assert (line["resumed_after"], line["ignored"]) == found[line["life"]]
    return merge_digests(answer["digests"] for answer in answers), [name for name in broken if name]


def test_a_killed_run_ends_with_the_same_weights(folder, uninterrupted):
    layout = "fsdp2"
    kills = [partial(kill_in_a_save, step=4), partial(kill_at, step=5, delay=0.02)]
    end, broken = live_and_die(Plan(layout, steps=8, async_mode="async"), folder, kills)
    assert end == uninterrupted(layout, 8)
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
    end, broken = live_and_die(Plan(layout, steps=20, async_mode=mode), folder, kills)
    assert end == uninterrupted(layout, 20)
    assert broken
