"""The loop on one rank: concurrent callers, swaps in flight, and failures of all pending calls."""

import asyncio
import itertools
import time
from dataclasses import replace

import pytest

from rl.errors import RunError
from tests.generation.scenarios import played
from tests.kit.generator_ranks import generate, request


def test_concurrent_calls_get_their_own_completions_in_order(generator):
    ((long, short, both),) = generator.run(played, concurrent_calls)
    assert [len(c.tokens) for c in long] == [30, 20]
    assert [len(c.tokens) for c in short] == [2]
    assert both == ["short", "long"]


def test_a_single_call_returns_the_completions_of_the_engine(generator):
    requests = [request(f"r{i}", [i + 1] * (i + 3), seed=i) for i in range(5)]
    (by_engine,) = generator.run(generate, requests)
    (by_loop,) = generator.run(played, lone_call, requests)
    assert by_loop == by_engine


def test_tokens_are_told_as_they_are_sampled(one_or_two_ranks):
    """Those of calls that do not stream are not."""
    ((parts, own, others),) = [each for each in one_or_two_ranks.run(played, streamed) if each]
    assert len(parts) > 10 and {part.request_id for part in parts} == {"said"}
    heard = [part.completion for part in parts]
    begins = [0, *itertools.accumulate(len(each.tokens) for each in heard)]
    assert [part.begin for part in parts] == begins[:-1]
    for name in ("tokens", "logprobs", "versions", "top_logprobs"):
        found = [value for each in heard for value in getattr(each, name)]
        assert found == getattr(own, name)[: len(found)]
        assert len(found) == len(own.tokens) - 1
    assert heard[0].prompt_logprobs[1:] == own.prompt_logprobs[1:]
    assert heard[0].prompt_top == own.prompt_top
    assert {each.prompt_logprobs for each in heard[1:]} == {None}
    assert own.tokens == others[1].tokens


def test_a_rank_says_when_it_had_requests_and_when_it_pulled(generator, other_policy):
    requests = [request("r", [1, 2], max_tokens=8)]
    weights = ("weights", other_policy.weights)
    ((first, second, began, ended),) = generator.run(played, working, requests, pull=weights)
    assert [name for name, _, _ in first] == ["pull", "generate", "generate"]
    assert second == []
    times = [time for _, *times in first for time in times]
    assert times == sorted(times)
    assert began <= times[0] and times[-1] <= ended


def test_bad_requests_fail_their_own_call_only(generator):
    ((errors, good),) = generator.run(played, bad_requests)
    assert errors == ["ValueError", "ValueError", "ValueError"]
    assert len(good[0].tokens) == 16


def test_a_cancelled_call_frees_its_requests(generator):
    ((busy, good),) = generator.run(played, cancelled_call)
    assert not busy
    assert len(good[0].tokens) == 4


@pytest.mark.parametrize("ids", [(), ("s",)])
def test_abort_ends_requests_in_flight_and_the_loop_continues(generator, ids):
    ((error, busy, good),) = generator.run(played, aborted, ids)
    assert error.startswith("RunError: the request was aborted")
    assert not busy
    assert len(good[0].tokens) == 4


def test_a_failure_in_the_thread_reaches_serve_and_all_pending_calls(generator):
    (errors,) = generator.run(played, failing_pull, pull=("raise", None))
    assert errors == [
        "serve: no such version 7",
        "generate: no such version 7",
        "pull: no such version 7",
        "later: no such version 7",
    ]


def test_close_ends_serve_and_fails_pending_calls(generator):
    ((served, pending, later),) = generator.run(played, closed_while_generating)
    assert served is None
    assert pending == "RunError: the generation loop was closed"
    assert later == "RunError: the generation loop is closed"


def test_an_engine_that_does_not_start_fails_start_and_serve():
    async def scenario():
        from rl.generation.loop import EngineLoop

        def broken():
            raise RunError("no memory")

        loop = EngineLoop(broken, lambda engine, version: None)
        with pytest.raises(RunError, match="no memory"):
            await loop.start()
        with pytest.raises(RunError, match="no memory"):
            await loop.serve()
        with pytest.raises(RunError, match="no memory"):
            await loop.generate([request("r")])
        await loop.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_the_load_of_an_engine_is_measured_at_each_step(generator):
    ((before, load, after),) = generator.run(played, measured)
    assert not before and not after
    assert load["generator/running_max"] == 2
    assert 1 < load["generator/running_mean"] < 2
    assert load["generator/queue_max"] == 0
    assert 0 < load["generator/cache_mean"] <= load["generator/cache_max"] < 1
    assert load["generator/preemptions"] == load["generator/prefix_hits"] == 0


def test_preemptions_and_hits_in_the_prefix_cache_are_counted(generator):
    ((load, figures),) = generator.run(played, crowded)
    assert load["generator/preemptions"] == 1
    assert load["generator/prefix_hits"] == pytest.approx(64 / (30 + 31 + 70 + 70))
    assert (figures["running"], figures["queue"]) == (0, 0)
    assert figures["prompt_tokens"] >= 201 and figures["sampled_tokens"] >= 22


def test_the_idle_time_begins_with_the_last_token(generator):
    ((waited, idle, took),) = generator.run(played, idled)
    assert waited > 0.05
    assert 0 <= idle < took


# Run on the rank, with its loop.


async def concurrent_calls(loop):
    finished = []

    async def one(name, requests):
        completions = await loop.generate(requests)
        finished.append(name)
        return completions

    long, short = await asyncio.gather(
        one("long", [request("a", max_tokens=30), request("b", max_tokens=20)]),
        one("short", [request("c", max_tokens=2)]),
    )
    return long, short, finished


async def streamed(loop):
    """Return the parts of a request that streams, its completion, and those of others beside it."""
    if not await loop.run_between_steps(lambda engine: engine.leads):
        await loop.serve()
        return None
    parts = []
    sampling = {"max_tokens": 30, "top_logprobs": 2, "prompt_logprobs": 1}
    said = replace(request("said", **sampling), streams=True)
    others = asyncio.create_task(loop.generate([request("a"), request("same", **sampling)]))
    (own,) = await asyncio.wrap_future(loop.begin([said], on_tokens=parts.append))
    return parts, own, await others


async def crowded(loop):
    """Have two requests that need a second block each, of which one is left, and then a prompt
    twice, of which two blocks are cached.
    """
    await loop.generate([request("a")])
    loop.take_load()

    def take(engine):
        pool = engine._engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        return pool, pool.get_new_blocks(pool.get_num_free_blocks() - 3)

    pool, taken = await loop.run_between_steps(take)
    await loop.generate(
        [request("a", [1] * 30, max_tokens=10), request("b", [2] * 31, max_tokens=10)]
    )
    await loop.run_between_steps(lambda engine: pool.free_blocks(taken))
    for name in ("r", "s"):
        await loop.generate([request(name, [3] * 70, max_tokens=1)])
    return dict(loop.take_load()), await loop.figures()


async def measured(loop):
    await loop.generate([request("a")])
    loop.take_load()
    before = loop.take_load()
    await loop.generate([request("a", max_tokens=30), request("b", max_tokens=10)])
    return dict(before), dict(loop.take_load()), dict(loop.take_load())


async def idled(loop):
    await asyncio.sleep(0.05)
    waited = loop.idle_s
    began = time.monotonic()
    await loop.generate([request("a", max_tokens=2)])
    return waited, loop.idle_s, time.monotonic() - began


async def working(loop, requests):
    loop.take_work()
    began = time.time()
    await loop.pull(1 + await loop.run_between_steps(lambda engine: engine.version))
    for _ in range(2):
        await loop.generate(requests)
    return loop.take_work(), loop.take_work(), began, time.time()


async def lone_call(loop, requests):
    return await loop.generate(requests)


async def bad_requests(loop):
    good = asyncio.create_task(loop.generate([request("good")]))
    await asyncio.sleep(0)
    bad = await asyncio.gather(
        loop.generate([request("fine"), request("long", max_tokens=1000)]),
        loop.generate([request("good")]),
        loop.generate([request("twin"), request("twin")]),
        return_exceptions=True,
    )
    return [type(error).__name__ for error in bad], await good


async def cancelled_call(loop):
    generating = asyncio.create_task(
        loop.generate([request("r", max_tokens=250), request("s", max_tokens=250)])
    )
    while not await loop.run_between_steps(lambda engine: engine.busy):
        pass
    generating.cancel()
    await asyncio.wait([generating])
    again = await loop.generate([request("r", max_tokens=4)])
    return await loop.run_between_steps(lambda engine: engine.busy), again


async def aborted(loop, ids=()):
    generating = asyncio.create_task(
        loop.generate([request("r", max_tokens=250), request("s", max_tokens=250)])
    )
    while not await loop.run_between_steps(lambda engine: engine.busy):
        pass
    await loop.abort("another")
    assert await loop.run_between_steps(lambda engine: engine.busy)
    await loop.abort(*ids)
    await asyncio.wait([generating])
    again = await loop.generate([request("r", max_tokens=4)])
    error = generating.exception()
    return (
        f"{type(error).__name__}: {error}",
        await loop.run_between_steps(lambda engine: engine.busy),
        again,
    )


async def failing_pull(loop):
    waiting = {
        "serve": loop.serve(),
        "generate": loop.generate([request("r", max_tokens=250)]),
        "pull": loop.pull(7),
    }
    errors = await asyncio.gather(*waiting.values(), return_exceptions=True)
    try:
        await loop.generate([request("later")])
    except RuntimeError as error:
        errors.append(error)
    await loop.abort()  # its calls have ended
    return [f"{who}: {error}" for who, error in zip([*waiting, "later"], errors, strict=True)]


async def closed_while_generating(loop):
    serving = asyncio.create_task(loop.serve())
    generating = asyncio.create_task(loop.generate([request("r", max_tokens=250)]))
    await asyncio.sleep(0)
    await loop.close()
    errors = []
    for pending in (generating, loop.generate([request("s")])):
        try:
            await pending
        except RunError as error:
            errors.append(f"RunError: {error}")
    return await serving, *errors
