"""Processes die and hang at random moments: the run goes on, and computes what it would have
computed. One such run of the default suite is in ``test_resume.py``.
"""

import random
import signal
import time

import pytest

from tests.e2e.pipelines import ASYNCHRONOUS, GROUPS, LOCKSTEP, ONE_AHEAD, STEPS, TWO_AHEAD
from tests.kit.runs import Run, assert_same, check_ledger, strike

BOUNDS = {TWO_AHEAD: 2, ASYNCHRONOUS: 2, LOCKSTEP: 0, ONE_AHEAD: 1}
"""Largest staleness of each pipeline."""
SEEDS = 20
BLOWS = 3


@pytest.mark.long
@pytest.mark.parametrize("seed", range(SEEDS))
def test_no_group_is_lost_or_counted_twice_after_deaths_and_hangs(tmp_path, finished, seed):
    rng = random.Random(seed)
    pipeline = [*BOUNDS][seed % len(BOUNDS)]
    actors = ["trainer", "reward-0", "generator-0"]
    actors += ["generator-1"] * ("--generator.replicas" in pipeline)
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
    restarts = run.json("summary.json")["restarts"]
    print(f"seed {seed}: {struck}, {restarts} restarts")
    assert restarts >= len([actor for actor in struck if actor != "reward-0"])
    reasons = check_ledger(run, STEPS, GROUPS, BOUNDS[pipeline]).values()
    assert {*reasons} <= {"rewards all equal", "reward died", "reward hung"}
    if pipeline != ASYNCHRONOUS:
        assert_same(run, finished(*pipeline))
