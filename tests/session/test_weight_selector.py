"""Generators hold one set of weights at a time; calls for others wait for their turn."""

import asyncio
from types import SimpleNamespace

import pytest

from rl.errors import RunError
from rl.session.weight_selector import WeightSelector


class Push:
    """The weights that generators hold, as names. It asserts that no block samples meanwhile."""

    def __init__(self):
        self.source = None
        self.state = SimpleNamespace(loaded=self)
        self.holds: list[object] = []
        self.sampling: list[object] = []

    async def hold(self, source):
        assert not self.sampling
        await asyncio.sleep(0)
        if source == "broken":
            raise RunError("broken cannot be read")
        if source != self.source:
            self.holds.append(source)
        self.source = source

    async def pull(self, version):
        assert self.source is None or not self.sampling
        await asyncio.sleep(0)
        self.source = None
        return version


async def sample(serving: WeightSelector, push: Push, source: object, ticks: int = 3) -> object:
    async with serving.of(source):
        push.sampling.append(source)
        for _ in range(ticks):
            await asyncio.sleep(0)
            assert push.source == source == push.sampling[0]
        push.sampling.remove(source)
    return source


async def test_calls_for_the_same_weights_share_a_turn_and_turns_are_fair():
    push = Push()
    serving = WeightSelector(push)
    asked = [None, "a", "b", None, "a", "b", "a"]
    assert await asyncio.gather(*(sample(serving, push, each) for each in asked)) == asked
    assert push.holds == ["a", "b", None]
    first = asyncio.create_task(sample(serving, push, None, ticks=50))
    await asyncio.sleep(0)
    second = asyncio.create_task(sample(serving, push, "a"))
    await asyncio.sleep(0)
    await asyncio.gather(first, second, *(sample(serving, push, None) for _ in range(3)))
    assert push.holds == ["a", "b", None, "a", None]


async def test_a_failure_or_a_cancelled_call_does_not_stop_other_turns():
    push = Push()
    serving = WeightSelector(push)
    left = asyncio.create_task(sample(serving, push, "a", ticks=1000))
    asked = [sample(serving, push, each) for each in ("broken", "b", "broken")]
    waiting = asyncio.gather(*asked, return_exceptions=True)
    for _ in range(10):
        await asyncio.sleep(0)
    push.sampling.clear()
    left.cancel()
    first, second, third = await waiting
    assert (str(first), second, str(third)) == ("broken cannot be read", "b", str(first))
    assert push.holds == ["a", "b"]


@pytest.mark.parametrize("held", [None, "a"])
async def test_a_push_waits_for_calls_of_a_snapshot_alone(held):
    push = Push()
    serving = WeightSelector(push)
    await sample(serving, push, "a")
    call = asyncio.create_task(sample(serving, push, held, ticks=20))
    for _ in range(10):
        await asyncio.sleep(0)
    pull = asyncio.create_task(serving.pull(3))
    later = asyncio.create_task(sample(serving, push, held))
    assert await pull == 3
    assert call.done() == (held == "a")
    await asyncio.gather(call, later)
