"""A reward that misbehaves loses its own group only, and the error names it."""

import asyncio
import contextlib
import dataclasses
import os
import re
import signal
import time
from collections import Counter

import pytest

from rl.actors.hosts import Hosts
from rl.actors.reward_workers import RewardWorkers
from rl.errors import GroupLost, RunError
from rl.observe.events import Events, print_texts
from rl.session.meshes import Meshes
from rl.session.session_config import SessionConfig
from rl.types import Completion
from rl.types.deadlines import DeadlineConfig
from tests import warm
from tests.kit.moody_task import (
    DIES,
    DIES_ONCE,
    EXITS,
    FORKS,
    HANGS,
    RAISES,
    SLOW,
    Later,
    Moody,
)
from tests.kit.processes import assert_ended, stop

DEADLINES = DeadlineConfig(start=200.0, heartbeat=4.0, reward=3.0)
COMPLETIONS = [
    Completion(tokens=[n], logprobs=[0.0], versions=[0], finish_reason="stop") for n in (4, 5)
]


def workers_and_task(folder, count: int, kind=Moody) -> tuple[RewardWorkers, Moody]:
    config = SessionConfig(reward_workers=count, deadlines=DEADLINES)
    task = kind.Config(folder=str(folder))
    workers = Meshes(config, Hosts(folder), folder).rewards(task, Events(print_texts))
    return workers, task.build(seed=0, model=config.model)


def pids_of(workers) -> list[int]:
    return [process.pid for group in workers._groups.values() for process in group._processes]


@contextlib.asynccontextmanager
async def running(workers):
    """Start workers; assert that they end after the block."""
    try:
        await workers.start()
        yield
    finally:
        pids = pids_of(workers)
        await workers.stop()
        await assert_ended(pids)


@contextlib.asynccontextmanager
async def scoring(folder, count, kind=Moody, *, reward_s=DEADLINES.reward):
    """Yield a function that scores a prompt, and the workers that do so."""
    workers, task = workers_and_task(folder, count, kind)
    workers.deadlines = dataclasses.replace(workers.deadlines, reward=reward_s)
    async with running(workers):
        yield lambda prompt_id: workers.score(task.prompt(prompt_id), COMPLETIONS), workers


async def lost(coroutine) -> tuple[str, str]:
    with pytest.raises(GroupLost) as error:
        await coroutine
    return error.value.reason, str(error.value)


async def assert_lost_by_raising(score, name="Moody") -> None:
    for prompt_id, error in (
        (RAISES, "ZeroDivisionError: no reward today"),
        (EXITS, "SystemExit: no reward, no worker"),
    ):
        reason, message = await lost(score(prompt_id))
        assert reason == "reward raised"
        said = f"the reward of {name} raised {error}; prompt {prompt_id}, sample 0, "
        assert message.startswith(said)


async def test_an_event_that_cannot_be_written_fails_the_calls_and_leaves_none_waiting(tmp_path):
    """The disk is full when a worker is lost."""

    def refuse(event):
        raise RunError("events.jsonl: cannot be written: No space left on device")

    async with scoring(tmp_path, 1) as (score, workers):
        workers.events.subscribe(refuse)
        for prompt_id in (DIES, 1):
            with pytest.raises(RunError, match=r"events.jsonl: cannot be written"):
                await asyncio.wait_for(score(prompt_id), 60)


@pytest.mark.parametrize("count", [0, 2])
async def test_each_caller_gets_its_group_and_a_bad_reward_loses_one(tmp_path, count):
    async with scoring(tmp_path, count) as (score, workers):
        answers = asyncio.gather(*map(score, range(50)), *[score(SLOW) for _ in range(8)])
        await assert_lost_by_raising(score)
        assert workers.restarts == 0
        groups, pids = await answers, pids_of(workers)

    assert [[r.reward for r in group] for group in groups] == [
        [n, n] for n in [*range(50), *[SLOW] * 8]
    ]
    assert groups[3][1].sample == 1
    assert groups[3][1].sequences[0].tokens[-1] == COMPLETIONS[1].tokens[-1]
    scorers = Counter(int(group[0].text) for group in groups)
    assert scorers.keys() == set(pids or [os.getpid()])


async def test_reward_that_kills_or_blocks_its_worker_is_tried_twice(tmp_path):
    """The last three groups go to the worker in one message."""

    async with scoring(tmp_path, 1) as (score, workers):
        before = pids_of(workers)
        one, died, two, hung = await asyncio.gather(
            score(1), lost(score(DIES)), score(2), lost(score(HANGS))
        )
        assert (one[0].reward, two[0].reward) == (1, 2)
        where = "reward-0 rank 0, score"
        assert died[0] == "reward died"
        assert died[1].startswith(
            f"the reward of Moody died; prompt {DIES}; {where}: the process died\nend of "
        )
        message = f"the reward of Moody hung; prompt {HANGS}; {where}: no answer within 3 s"
        assert hung == ("reward hung", message)
        assert (await score(3))[0].reward == 3
        assert before != pids_of(workers)
        assert workers.restarts >= 3


@pytest.mark.parametrize("count", [0, 1])
async def test_rewards_that_are_awaited_run_at_once(tmp_path, count):
    async with scoring(tmp_path, count, Later, reward_s=100.0) as (score, workers):
        slow = []
        for _ in range(8):  # one after the other, as groups are finished
            slow.append(asyncio.ensure_future(score(SLOW)))
            await asyncio.sleep(0)
        await assert_lost_by_raising(score, "Later")
        groups = await asyncio.gather(*slow)
        assert [[r.reward for r in group] for group in groups] == [[SLOW, SLOW]] * 8
        assert workers.restarts == 0
        if count:
            one, died = await asyncio.gather(score(1), lost(score(DIES)))
            assert one[0].reward == 1
            assert died[0] == "reward died"
            assert workers.restarts >= 2


@pytest.mark.parametrize("count", [0, 1])
async def test_a_reward_that_is_awaited_for_too_long_costs_no_worker(tmp_path, count):
    async with scoring(tmp_path, count, Later, reward_s=1.0) as (score, workers):
        message = f"the reward of Later hung; prompt {HANGS}; no answer within 1 s"
        assert await lost(score(HANGS)) == ("reward hung", message)
        assert workers.restarts == 0


async def test_lost_worker_is_started_again_while_another_goes_on(tmp_path):
    async with scoring(tmp_path, 2) as (score, workers):
        before = pids_of(workers)
        os.kill(before[0], signal.SIGKILL)
        stop(before[1])
        groups = await asyncio.gather(*map(score, [*range(10), DIES_ONCE]))
        assert [group[0].reward for group in groups] == [*range(10), DIES_ONCE]
        assert not set(before) & {int(group[0].text) for group in groups}


async def test_a_worker_that_cannot_be_started_again_fails_the_calls(tmp_path):
    async with scoring(tmp_path, 1) as (score, workers):
        (tmp_path / "file").touch()
        workers.hosts.logs = tmp_path / "file" / "logs"
        for prompt_id in (DIES, 1):
            with pytest.raises(RunError, match=r"reward-0 cannot be started again: NotADirectory"):
                await asyncio.wait_for(score(prompt_id), 60)


@pytest.mark.parametrize("end", ["cancelled", "stopped"])
async def test_groups_that_no_caller_waits_for_are_not_scored(tmp_path, end):
    async with scoring(tmp_path, 1) as (score, workers):
        first, second = [asyncio.ensure_future(score(prompt_id)) for prompt_id in (SLOW, HANGS)]
        await asyncio.sleep(0)  # one worker has the first, the second waits
        if end == "cancelled":
            second.cancel()
        else:
            await workers.stop()
            await workers.start()
        await score(1)
        await asyncio.wait([first, second])
        assert workers.restarts == 0


async def test_stop_fails_pending_calls(tmp_path):
    async with scoring(tmp_path, 1) as (score, workers):
        pending = [asyncio.ensure_future(score(prompt_id)) for prompt_id in (HANGS, 1, 2)]
        await asyncio.sleep(0.3)
        await workers.stop()
        for each in pending:
            with pytest.raises(RunError, match="the reward workers were stopped"):
                await each


def forked(folder) -> list[int]:
    """Return the processes that the reward has started since the last call."""
    pids = [int(line) for line in (folder / "forked").read_text().splitlines()]
    (folder / "forked").unlink()
    assert len(pids) == 4
    assert os.path.exists(f"/proc/{pids[0]}")
    assert os.path.exists(f"/proc/{pids[3]}")
    return pids


async def test_processes_of_a_reward_end_with_its_worker(tmp_path):
    async with scoring(tmp_path, 1) as (score, workers):
        await score(FORKS)
        pids = forked(tmp_path)
        hangs = asyncio.ensure_future(lost(score(HANGS)))
        await assert_ended(pids)  # after the first try
        await hangs
        await score(FORKS)
        pids = forked(tmp_path)
        await workers.stop()
        await assert_ended(pids)


def test_processes_of_a_reward_end_with_a_killed_controller(tmp_path):
    out = tmp_path / "out"
    command = ["tests.actors.reward_controller", tmp_path]
    out.touch()
    controller = warm.Program(command, stdout=out, stderr=tmp_path / "err")
    try:
        while not (scored := re.findall(r"(\d+) scored\n", out.read_text())):
            assert controller.poll() is None, (tmp_path / "err").read_text()
            time.sleep(0.05)
        pids = [int(*scored), *forked(tmp_path)]
    finally:
        controller.kill()
        controller.wait()
    asyncio.run(assert_ended(pids))
