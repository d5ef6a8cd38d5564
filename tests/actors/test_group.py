"""Every call to an actor ends: with results in rank order, or with the name of the rank that did not give one."""

import asyncio
import os
import signal
import time

import pytest
from monarch.actor import Actor, current_rank, endpoint

from rl.actors.group import ActorGroup, Supervisor
from rl.errors import RunError


class Moody(Actor):
    def __init__(self, mood: str):
        self._mood, self._rank = mood, current_rank().rank

    @endpoint
    async def say(self, word: str) -> str:
        return f"{self._mood} {word} {self._rank} {os.environ['RANK']}/{os.environ['WORLD_SIZE']} {os.environ['EXTRA']}"

    @endpoint
    async def fail_on_rank_1(self) -> None:
        print("about to fail", flush=True)
        if self._rank == 1:
            raise ValueError("not today")
        await asyncio.sleep(3600)  # as a peer that waits for it in a collective

    @endpoint
    async def hang_on_rank_0(self) -> None:
        await asyncio.sleep(3600 * (self._rank == 0))

    @endpoint
    async def die_on_rank_1(self) -> None:
        print("last words", flush=True)
        if self._rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(3600)

    @endpoint
    async def pid(self) -> int:
        return os.getpid()


@pytest.fixture
def in_group(tmp_path):
    """Runs ``work(group, supervisor)`` with two ranks, and asserts that they end with it."""

    def run(work):
        async def started():
            supervisor = Supervisor()
            group = ActorGroup("moody", supervisor, logs=tmp_path)
            group.spawn(Moody, 2, "cheerful", env={"EXTRA": "set"})
            try:
                pids = await group.call("pid", deadline=60)
                return await work(group, supervisor), pids
            finally:
                supervisor.stop()
                await group.stop()

        result, pids = asyncio.run(started())
        deadline = time.monotonic() + 10
        while any(os.path.exists(f"/proc/{pid}") for pid in pids):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return result

    return run


async def raised(coroutine) -> tuple[str, float]:
    start = time.monotonic()
    with pytest.raises(RunError) as error:
        await coroutine
    return str(error.value), time.monotonic() - start


def test_results_come_in_rank_order_and_one_rank_can_be_asked_alone(in_group):
    async def work(group, _):
        return await group.call("say", "hello", deadline=30), await group.call("say", "you", rank=1, deadline=30)

    everyone, alone = in_group(work)
    assert everyone == ["cheerful hello 0 0/2 set", "cheerful hello 1 1/2 set"]
    assert alone == ["cheerful you 1 1/2 set"]


def test_a_rank_that_raises_is_named_at_once_while_its_peer_waits(in_group):
    async def work(group, _):
        return await raised(group.call("fail_on_rank_1", deadline=60))

    message, seconds = in_group(work)
    assert message.startswith("moody rank 1, fail_on_rank_1: ValueError: not today")
    assert "test_group.py" in message  # the remote traceback
    assert seconds < 30


def test_a_silent_rank_is_given_up_at_the_deadline(in_group):
    async def work(group, _):
        return await raised(group.call("hang_on_rank_0", deadline=1.0))

    message, seconds = in_group(work)
    assert message == "moody.hang_on_rank_0: no answer within 1 s; 1 of 2 ranks are silent"
    assert seconds < 30


def test_a_killed_rank_is_named_with_its_last_words(in_group):
    async def work(group, _):
        return await raised(group.call("die_on_rank_1", deadline=60))

    message, seconds = in_group(work)
    assert message.startswith("moody rank 1, die_on_rank_1: the process died: ")
    assert "Killed(sig=9)" in message
    assert message.endswith("last words")
    assert seconds < 55


def test_a_rank_that_dies_between_calls_ends_whatever_is_waited_for(in_group):
    async def work(group, supervisor):
        os.kill((await group.call("pid", deadline=30))[1], signal.SIGKILL)
        elsewhere = asyncio.ensure_future(asyncio.sleep(3600))
        return await raised(supervisor.wait([elsewhere], deadline=60, what="something else"))

    message, seconds = in_group(work)
    assert message.startswith("moody rank 1, between calls: the process died: ")
    reason, found, _ = message.partition("\nend of ")
    assert found
    assert reason.endswith(("Killed(sig=9)", "The process likely crashed"))  # on a busy host Monarch knows no more
    assert seconds < 55
