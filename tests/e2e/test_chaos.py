"""Processes die and hang at random moments: the run goes on, and computes what it would have
computed. One such run of the default suite is in ``test_resume.py``.
"""

import random
import signal
import time

import pytest

from tests.e2e.pipelines import ASYNCHRONOUS, GROUPS, LOCKSTEP, ONE_AHEAD, STEPS, TWO_AHEAD
from tests.e2e.runs import Run, digest, numbers, trained

PIPELINES = (TWO_AHEAD, ASYNCHRONOUS, LOCKSTEP, ONE_AHEAD)
SEEDS = 20
BLOWS = 3
WITHIN_S = 290.0  # until a blow is reported: longest for a process that is starting


def strike(run: Run, actor: str, number: signal.Signals) -> bool:
    """Send the signal and wait until the run has named the actor. Return False if the run ended
    first.
    """

    def told() -> int:
        return sum(
            line.startswith(f"warning: {actor} rank 0, ") for line in run.stdout.splitlines()
        )

    before = told()
    deadline = time.monotonic() + WITHIN_S
    while run.strike(actor, number) is None and run.process.poll() is None:
        time.sleep(0.1)
    while told() == before and run.process.poll() is None:
        assert time.monotonic() < deadline, (
            f"nothing was said of {actor} ({number.name}): {run.stdout}"
        )
        time.sleep(0.1)
    return told() > before


@pytest.mark.long
@pytest.mark.parametrize("seed", range(SEEDS))
def test_no_group_is_lost_or_counted_twice_after_deaths_and_hangs(tmp_path, finished, seed):
    rng = random.Random(seed)
    pipeline = PIPELINES[seed % len(PIPELINES)]
    actors = [
        "trainer",
        "reward-0",
        "generator-0",
        *(["generator-1"] if "--generator.replicas" in pipeline else []),
    ]
    kinds = [(actor, number) for actor in actors for number in (signal.SIGKILL, signal.SIGSTOP)]
    steps = sorted(rng.randrange(STEPS - 6) for _ in range(BLOWS))
    struck: list[str] = []
    run = Run(*pipeline, folder=tmp_path / "run")
    for step, (actor, number) in zip(steps, rng.sample(kinds, BLOWS), strict=True):
        run.until(lambda step=step: len(run.metrics()) >= step and "push over" in run.stdout)
        time.sleep(rng.uniform(0, 1))
        struck += [actor] * strike(run, actor, number)
    assert run.wait() == 0, run.stderr
    run.assert_nothing_left()
    print(f"seed {seed}: {struck}, {run.json('summary.json')['restarts']} restarts")
    assert run.json("summary.json")["restarts"] >= len(
        [actor for actor in struck if actor != "reward-0"]
    )
    bound = 0 if pipeline == LOCKSTEP else 1 if pipeline == ONE_AHEAD else 2
    check_ledger(run, STEPS, bound)
    if pipeline != ASYNCHRONOUS:
        undisturbed = finished(*pipeline)
        assert numbers(run, "push/") == numbers(undisturbed, "push/")
        assert run.rollouts() == undisturbed.rollouts()
        assert trained(run) == trained(undisturbed)
        assert run.lines("evaluations.jsonl") == undisturbed.lines("evaluations.jsonl")
        assert digest(run) == digest(undisturbed)


def check_ledger(run: Run, steps: int, bound: int) -> None:
    """Check that each prompt_id was trained on once, was dropped for a reason, or is waiting, and
    that no rollout was older than ``bound`` steps.
    """
    rows = run.lines("ledger.jsonl")
    assert (
        [row["step"] for row in run.metrics()]
        == [row["step"] for row in rows]
        == [*range(1, steps + 1)]
    )
    assert all(len(row["trained_now"]) == GROUPS for row in rows)
    trained = [prompt_id for row in rows for prompt_id in row["trained_now"]]
    dropped = [
        prompt_id
        for row in rows
        for prompt_ids in row["dropped_now"].values()
        for prompt_id in prompt_ids
    ]
    assert len({*trained, *dropped}) == len(trained) + len(dropped)
    reasons = {reason for row in rows for reason in row["dropped_now"]}
    assert reasons <= {"rewards all equal", "reward died", "reward hung"}
    missing = {*range(rows[-1]["submitted"])} - {*trained, *dropped}
    assert len(missing) == rows[-1]["waiting"]
    assert rows[-1]["running"] == rows[-1]["finished"] == 0
    assert max(int(age) for row in rows for age in row["staleness"]) <= bound
