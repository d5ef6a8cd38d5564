"""Calls that come together are one message, and each ends with its own answer."""

import asyncio
import random
from concurrent.futures import Future

import pytest

from rl.actors import gathering
from rl.actors.gathering import Answers, Gathered
from tests.tinker.clients import shortened


class Rank:
    """A rank in this process. A call asks for the name of its answer."""

    def __init__(self):
        self.answers = Answers(self.start, self.check)
        self.calls = Gathered(self.send)
        self.messages = []
        self.running: dict[str, Future] = {}
        self.says = {}
        self.failure = None

    def start(self, name: str, on_part) -> Future:
        if name == "refused":
            raise ValueError("refused")
        self.running[name] = Future()
        self.says[name] = on_part
        return self.running[name]

    def check(self):
        if self.failure:
            raise self.failure

    async def send(self, batch):
        self.messages.append([name for _, name in batch])
        return await self.answers.of(batch)

    def finish(self, *names: str):
        for name in names:
            self.running.pop(name).set_result(f"answer of {name}")

    async def until(self, *names: str):
        while not self.running.keys() >= {*names}:
            await asyncio.sleep(0.001)

    def ask(self, *names: str):
        return [asyncio.create_task(self.calls.make(name)) for name in names]

    async def is_empty(self) -> bool:
        while self.calls._messages:
            await asyncio.sleep(0.001)
        found = (self.calls._in_flight, self.calls._new, self.answers._running)
        return not any((*found, self.answers._finished))


async def test_calls_that_come_together_are_one_message_and_end_one_by_one():
    rank = Rank()
    long, short, other = rank.ask("long", "short", "other")
    await rank.until("long", "short", "other")
    assert rank.messages == [["long", "short", "other"]]
    rank.finish("short", "other")
    assert await asyncio.gather(short, other) == ["answer of short", "answer of other"]
    assert not long.done()
    assert rank.messages[1:] in ([], [[]])  # both answers were one message
    (late,) = rank.ask("late")
    await rank.until("late")
    rank.finish("late")
    assert await late == "answer of late"
    rank.finish("long")
    assert await long == "answer of long"
    assert await rank.is_empty()


async def test_a_cancelled_call_leaves_the_others():
    rank = Rank()
    unsent, kept = rank.ask("unsent", "kept")
    await asyncio.sleep(0)
    unsent.cancel()
    await rank.until("kept")
    assert rank.messages == [["kept"]]
    (gone,) = rank.ask("gone")
    await rank.until("gone")
    gone.cancel()
    rank.running.pop("gone").set_exception(RuntimeError("aborted"))
    rank.finish("kept")
    assert await kept == "answer of kept"
    assert await rank.is_empty()


async def test_an_exception_fails_its_own_call_alone():
    rank = Rank()
    refused, broken, good = rank.ask("refused", "broken", "good")
    with pytest.raises(ValueError, match="refused"):
        await refused
    rank.running.pop("broken").set_exception(RuntimeError("broken"))
    with pytest.raises(RuntimeError, match="broken"):
        await broken
    rank.finish("good")
    assert await good == "answer of good"


async def test_parts_of_an_answer_come_before_it_and_what_hears_them_may_fail():
    rank = Rank()
    heard = []

    def hear(part):
        heard.append(part)
        raise ValueError("of its own")

    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    said = asyncio.create_task(rank.calls.make("said", hear))
    (other,) = rank.ask("other")
    await rank.until("said", "other")
    rank.says["other"]("nobody hears this")
    rank.says["said"](1)
    rank.finish("other")
    assert await other == "answer of other"
    assert heard == [1] and not said.done()
    rank.says["said"](2)
    rank.says["said"](3)
    rank.finish("said")
    assert await said == "answer of said"
    assert heard == [1, 2, 3]
    assert await rank.is_empty() and not rank.calls._hearers


async def test_a_failure_of_the_rank_fails_all_calls_and_later_ones_can_work():
    rank = Rank()
    calls = rank.ask("one", "two")
    await rank.until("one", "two")
    rank.failure = RuntimeError("the loop has ended")
    (late,) = rank.ask("late")
    for call in (*calls, late):
        with pytest.raises(RuntimeError, match="ended"):
            await call
    rank.failure = None
    (later,) = rank.ask("later")
    await rank.until("later")
    rank.finish("later")
    assert await later == "answer of later"


async def test_many_calls_of_many_callers_lose_nothing_and_need_few_messages():
    rank = Rank()
    draw = random.Random(0)
    clients, each = 64, 32

    async def client(number: int):
        for turn in range(each):
            name = f"{number}/{turn}"
            assert await rank.calls.make(name) == f"answer of {name}"

    async def work():
        while True:
            await asyncio.sleep(0.001)
            rank.finish(*draw.sample(sorted(rank.running), len(rank.running) // 2))
            rank.finish(*[*rank.running][:1])

    with shortened(gathering, GATHER_S=0.001):
        working = asyncio.create_task(work())
        await asyncio.gather(*map(client, range(clients)))
        working.cancel()
    assert sum(map(len, rank.messages)) == clients * each
    assert len(rank.messages) < clients * each / 2
    assert await rank.is_empty()
