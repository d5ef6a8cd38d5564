"""Pulls while the loop generates: drained, replaced by newer ones, cancelled, closed."""

import asyncio
import functools
import threading
import time
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from tests.generation.scenarios import played
from tests.kit.generator_ranks import request
from tests.kit.policies import error
from tests.kit.tables import long

IN_FLIGHT = [
    request("a", [9] * 70, max_tokens=60, seed=1),
    request("b", range(50), max_tokens=90, seed=2),
]
NEW = [request("r", [9] * 70, seed=5), request("s", [4], seed=6)]


def test_draining_gives_every_completion_one_version(one_or_two_ranks, policy, other_policy):
    completions, pulled, steps = one_or_two_ranks.run(
        played, drain, pull=("weights", other_policy.weights), swap="drain"
    )[0]
    assert [set(completion.versions) for completion in completions] == [{1}, {1}, {2}, {2}]
    for each, completion in zip(IN_FLIGHT + NEW, completions, strict=True):
        sampled = policy if completion.versions[0] == 1 else other_policy
        assert error(sampled, each.prompt_tokens, completion) <= 1e-4
    assert pulled.version == 2
    assert pulled.pause_s == 0 < steps  # generation continued while the pull waited


@pytest.mark.parametrize(
    ("one_or_two_ranks", "swap"),
    [
        ("generator", "drain"),
        ("generator", "recompute"),
        long("generator", "continue"),
        long("generators", "continue"),
        long("generators", "drain"),
        long("generators", "recompute"),
    ],
    indirect=["one_or_two_ranks"],
)
def test_a_pull_that_has_not_begun_gives_way_to_a_newer_one(one_or_two_ranks, other_policy, swap):
    pulls, late, completion = one_or_two_ranks.run(
        played, pull_thrice, pull=("weights", other_policy.weights), swap=swap
    )[0]
    assert [pulled.version for pulled in pulls] == [4, 4, 4]
    assert late.version == 4
    assert late.pause_s == 0
    assert set(completion.versions) == ({1} if swap == "drain" else {1, 4})


def test_all_ranks_hold_the_newest_version_that_any_rank_found(
    one_or_two_ranks, policy, other_policy
):
    there = {2: policy.weights, 3: other_policy.weights}
    pulled, completion = one_or_two_ranks.run(played, pull_what_is_there, pull=("newest", there))[0]
    assert pulled.version == 3
    assert completion.versions == [3] * 16
    assert error(other_policy, [1, 2, 3], completion) <= 1e-4


def test_calls_cancelled_while_draining_are_dropped(generator, other_policy):
    ((pulled, busy, again),) = generator.run(
        played, cancel_while_draining, pull=("weights", other_policy.weights), swap="drain"
    )
    assert pulled.version == 2
    assert not busy
    assert again.versions == [2] * 3


def test_a_loop_that_drains_can_be_closed(one_or_two_ranks):
    errors = one_or_two_ranks.run(played, close_while_draining, swap="drain")[0]
    assert errors == ["the generation loop was closed"] * 3


# Run on the ranks, with their loops.


def led(scenario):
    """Run ``scenario`` on rank 0; the other ranks follow until it ends."""

    @functools.wraps(scenario)
    async def lead_or_follow(loop):
        if await loop.run_between_steps(lambda engine: engine.leads):
            return await scenario(loop)
        return await loop.serve()

    return lead_or_follow


async def in_flight(loop, requests):
    generating = asyncio.create_task(loop.generate(requests))
    while not await loop.run_between_steps(lambda engine: engine.busy):
        pass
    return generating


@asynccontextmanager
async def between_steps(loop):
    """Pause the engine; it gets all commands of the block together."""
    stands = threading.Event()
    may_go = threading.Event()

    def stand(engine):
        stands.set()
        assert may_go.wait(60)

    visit = asyncio.create_task(loop.run_between_steps(stand))
    while not stands.is_set():
        await asyncio.sleep(0.001)
    yield
    await asyncio.sleep(0)  # tasks made meanwhile ask now
    may_go.set()
    await visit


@contextmanager
def counted_steps(engine):
    """Yield a list that grows at each step; the loop's clock of pauses counts them."""
    import rl.generation.loop as engine_loop

    steps = []

    def step():
        steps.append(engine.version)
        return engine._real.step()

    clock = SimpleNamespace(time=time.time, perf_counter=lambda: float(len(steps)))
    with patch.object(engine_loop, "time", clock):
        engine.step = step
        yield steps
        del engine.step


@led
async def drain(loop):
    with counted_steps(await loop.run_between_steps(lambda engine: engine)) as steps:
        before = await in_flight(loop, IN_FLIGHT)
        async with between_steps(loop):
            began = len(steps)
            pull = asyncio.create_task(loop.pull(2))
            after = asyncio.create_task(loop.generate(NEW))
        pulled = await pull
        waited = len(steps) - began
        return await before + await after, pulled, waited


@led
async def pull_thrice(loop):
    generating = await in_flight(loop, [request("r", max_tokens=200)])
    async with between_steps(loop):
        pulls = [asyncio.create_task(loop.pull(version)) for version in (2, 4, 3)]
    pulled = await asyncio.gather(*pulls)
    return pulled, await loop.pull(3), (await generating)[0]


@led
async def pull_what_is_there(loop):
    return await loop.pull(2), (await loop.generate([request("r")]))[0]


@led
async def cancel_while_draining(loop):
    running = await in_flight(loop, [request("a", max_tokens=200)])
    async with between_steps(loop):
        pull = asyncio.create_task(loop.pull(2))
        held_back = asyncio.create_task(loop.generate([request("b", max_tokens=250)]))
        await asyncio.sleep(0)
        running.cancel()
        held_back.cancel()
    pulled = await pull
    busy = await loop.run_between_steps(lambda engine: engine.busy)
    return pulled, busy, (await loop.generate([request("b", max_tokens=3)]))[0]


@led
async def close_while_draining(loop):
    running = await in_flight(loop, [request("a", max_tokens=200)])
    async with between_steps(loop):
        others = [
            asyncio.create_task(loop.pull(2)),
            asyncio.create_task(loop.generate([request("b")])),
        ]
    await loop.close()
    return [str(error) for error in await asyncio.gather(running, *others, return_exceptions=True)]
