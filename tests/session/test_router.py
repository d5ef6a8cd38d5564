"""Requests go to the least loaded generator, and to another if it is lost."""

import asyncio
import random
from collections import Counter

import pytest

from rl.actors.generator import GeneratorMesh
from rl.errors import ActorFailure, RankLost
from rl.session.router import Router
from rl.types import Completion, GenerationRequest, Sampling

SAID = Completion(tokens=[1], logprobs=[0.0], versions=[0], finish_reason="stop")


class Replica:
    """Answers when ``answer`` is called."""

    state = "absent"
    is_running = True
    load = turn = 0
    has_answered = False
    is_serving = GeneratorMesh.is_serving

    def __init__(self, name: str):
        self.name = name
        self.asked = []
        self.fresh = []
        self.hearers = []
        self._answers: list[asyncio.Future] = []

    async def generate(self, requests, *, fresh=False, adapter=None, on_tokens=None):
        self.asked.append([request.request_id for request in requests])
        self.fresh.append(fresh)
        self.hearers.append(on_tokens)
        answer = asyncio.get_running_loop().create_future()
        self._answers.append(answer)
        await answer
        return [SAID] * len(requests)

    def answer(self, error: Exception | None = None) -> None:
        for each in self._answers:
            if not each.done():
                each.set_exception(error) if error else each.set_result(None)


def failure(kind: str, replica: Replica) -> ActorFailure:
    kind_of = ActorFailure if kind == "raised" else RankLost
    return kind_of(
        f"{replica.name} rank 0, generate: gone",
        actor=replica.name,
        rank=0,
        call="generate",
        kind=kind,
    )


def requests(*names: str) -> list[GenerationRequest]:
    sampling = Sampling(max_tokens=1)
    return [
        GenerationRequest(request_id=name, prompt_tokens=[1], seed=0, sampling=sampling)
        for name in names
    ]


def played(scenario):
    """Make a test of ``scenario(router, a, b, ask)`` with two generators."""

    async def main():
        router = Router()
        replicas = [Replica("a"), Replica("b")]
        for replica in replicas:
            router.join(replica)
        tasks = []

        async def ask(*names, **options):
            call = router.generate(requests(*names), **options)
            tasks.append(asyncio.ensure_future(call))
            for _ in range(3):
                await asyncio.sleep(0)
            return tasks[-1]

        try:
            await asyncio.wait_for(scenario(router, *replicas, ask), 60)
        finally:
            for task in tasks:
                task.cancel()

    return lambda: asyncio.run(main())


@played
async def test_affinity_keeps_a_generator_until_it_is_lost(router, a, b, ask):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rl.session.router.AFFINITIES", 2)
        await ask("1", affinity="x")
        await ask("2", "3", affinity="x")
        await ask("4", affinity="y")
        assert (a.asked, b.asked) == ([["1"], ["2", "3"]], [["4"]])
        b.answer()
        await asyncio.sleep(0.01)
        await ask("5", affinity="x")
        assert a.asked[-1] == ["5"]
        a.state = "absent"
        await ask("6", affinity="x")
        assert b.asked[-1] == ["6"]
        await ask("7", affinity="z")
        assert len(router._homes) == 2


@played
async def test_requests_of_a_lost_generator_go_to_another(router, a, b, ask):
    heard = []
    first = await ask("1", on_tokens=heard.append)
    assert a.hearers == [heard.append]
    a.is_running = False
    a.answer(failure("died", a))
    await asyncio.sleep(0.01)
    assert b.asked == [["1"]]
    await ask("2")
    assert b.asked == [["1"], ["2"]]
    assert b.hearers == [heard.append, None]
    b.answer()
    assert await first == [SAID]
    assert (a.has_answered, b.has_answered) == (False, True)
    assert not a.is_serving and b.is_serving


@played
async def test_requests_wait_for_a_generator_to_join(router, a, b, ask):
    a.state = b.state = "absent"
    waiting = await ask("1")
    assert not a.asked + b.asked
    router.join(b)
    await asyncio.sleep(0.01)
    b.answer()
    assert await waiting == [SAID]


@played
async def test_exception_of_a_generator_is_not_retried(router, a, b, ask):
    first = await ask("1")
    a.answer(failure("raised", a))
    with pytest.raises(ActorFailure, match="gone"):
        await first
    assert not b.asked


@played
async def test_late_failure_does_not_remove_a_generator_that_joined_again(router, a, b, ask):
    await ask("1")
    a.state = "absent"
    router.join(a)
    a.answer(failure("died", a))
    await asyncio.sleep(0.01)
    assert a.is_serving and b.is_serving
    assert a.asked + b.asked == [["1"], ["1"]]


@played
async def test_call_alone_waits_for_an_idle_generator(router, a, b, ask):
    await ask("1", alone=True)
    await ask("2", alone=True)
    third = await ask("3", alone=True)
    assert (a.asked, b.asked, a.fresh) == ([["1"]], [["2"]], [True])
    b.answer()
    await asyncio.sleep(0.01)
    assert b.asked == [["2"], ["3"]]
    b.answer()
    assert await third == [SAID]


@played
async def test_drain_waits_and_sends_no_more_requests(router, a, b, ask):
    await ask("1")
    draining = asyncio.ensure_future(router.drain(a))
    await ask("2")
    assert (b.asked, draining.done()) == ([["2"]], False)
    a.answer()
    await asyncio.wait_for(draining, 60)


def test_choice_is_that_of_a_scan_of_all_generators():
    """Loads change, and generators leave and join."""

    async def scenario():
        router = Router()
        draw = random.Random(0)
        replicas = [Replica(str(number)) for number in range(7)]
        order = []  # of the generators that get requests, the least recently chosen one first
        load = Counter()
        calls = []
        for step in range(600):
            left = [each for each in replicas if not each.is_serving]
            if left and (len(left) == 7 or draw.random() < 0.2):
                order.append(draw.choice(left))
                router.join(order[-1])
            elif len(order) > 1 and draw.random() < 0.05:
                leaving = order.pop(draw.randrange(len(order)))
                leaving.state = "absent"
            if calls and draw.random() < 0.4:
                call, place, size, answer = calls.pop(draw.randrange(len(calls)))
                answer.set_result(None)
                await call
                load[place] -= size
            size = draw.randint(0, 3)
            expected = min(order, key=lambda each: load[each])
            names = [f"{step}/{number}" for number in range(size)]
            call = asyncio.ensure_future(router.generate(requests(*names)))
            await asyncio.sleep(0)
            assert expected.asked[-1] == names
            answer = expected._answers[-1]
            order.remove(expected)
            order.append(expected)
            load[expected] += size
            calls.append((call, expected, size, answer))
        assert len(router._heap) <= 4 * len(replicas) + 64 + 1
        for call, *_ in calls:
            call.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 120))
