"""Concurrent work ends together, with its first failure."""

import asyncio

import pytest

from rl.session.concurrency import Shares, Signal, background

ENDINGS = {
    "returns": None,
    "raises": ZeroDivisionError,
    "its work fails": ValueError,
    "work that was added fails": ValueError,
    "is cancelled": asyncio.CancelledError,
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_work_ends_with_the_block_and_the_first_failure_keeps_its_cause(ending):
    async def fail(error: Exception, *, after: float = 0.0) -> None:
        await asyncio.sleep(after)
        raise error

    async def forever(ended: list[str]) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("work")

    ended: list[str] = []
    first = ValueError("first")
    first.__cause__ = KeyError("before it")
    failing = [fail(first), fail(TypeError("second"), after=0.1)]

    async def block() -> None:
        work = failing if ending == "its work fails" else []
        async with background(forever(ended), *work) as group:
            await asyncio.sleep(0)
            if ending == "raises":
                raise ZeroDivisionError
            if ending == "work that was added fails":
                group.create_task(failing[0])
            if ending != "returns":
                await asyncio.sleep(60)

    async def main() -> None:
        task = asyncio.ensure_future(block())
        await asyncio.sleep(0.01)
        if ending == "is cancelled":
            task.cancel()
        await asyncio.wait([task])
        for each in failing:
            each.close()
        await task

    if ENDINGS[ending] is None:
        asyncio.run(main())
    else:
        with pytest.raises(ENDINGS[ending]) as error:
            asyncio.run(main())
        assert ENDINGS[ending] is not ValueError or error.value is first
    assert ended == ["work"]
    assert isinstance(first.__cause__, KeyError)


async def test_signal_wakes_only_tasks_with_a_true_condition():
    signal = Signal()
    count = [0]
    woken = []

    async def wait(number):
        await signal.until(lambda: count[0] >= number)
        woken.append(number)

    tasks = [asyncio.ensure_future(wait(number)) for number in (2, 0, 1)]
    for _ in range(2):
        await asyncio.sleep(0.01)
        count[0] += 1
        signal.notify()
    await asyncio.wait_for(asyncio.gather(*tasks), 60)
    assert woken == [0, 1, 2]


def began(asks, *, room, cancelled=()):
    """Return clients and numbers of pieces of work in the order in which they begin, and the most
    room that was taken. ``asks`` are clients and sizes; all come before any work has ended.
    """
    order: list[tuple[str, int]] = []
    taken = [0]

    async def work(shares, number, client, size):
        async with shares.of(client, size):
            order.append((client, number))
            taken.append(taken[-1] + min(size, room))
            await asyncio.sleep(0.001)
            taken.append(taken[-1] - min(size, room))

    async def all_of_it():
        shares = Shares(lambda: room)
        tasks = [asyncio.create_task(work(shares, n, *each)) for n, each in enumerate(asks)]
        await asyncio.sleep(0)
        for number in cancelled:
            tasks[number].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with asyncio.timeout(60), shares.of("last", room):  # all room is free again
            pass

    asyncio.run(all_of_it())
    return order, max(taken)


def test_a_client_gets_its_turn_however_much_work_another_has_sent_before():
    asks = [("greedy", 1)] * 40 + [("modest", 1)] * 4 + [("third", 1)] * 2
    order, most = began(asks, room=4)
    assert most == 4
    assert len(order) == len(asks)
    clients = [client for client, _ in order]
    assert clients[:4] == ["greedy"] * 4  # nobody else was there
    assert sorted(clients[4:10]) == sorted(["greedy", "modest", "third"] * 2)
    assert clients[10:14].count("modest") == 2
    for client in ("greedy", "modest", "third"):
        numbers = [number for each, number in order if each == client]
        assert numbers == sorted(numbers)


def test_large_work_waits_for_room_and_takes_no_more_than_all():
    order, most = began([("a", 3), ("b", 9), ("c", 1), ("a", 1)], room=4)
    assert most == 4
    assert [client for client, _ in order] == ["a", "b", "c", "a"]


def test_work_that_is_cancelled_leaves_its_room_to_others():
    asks = [("a", 2), ("a", 2), ("b", 2), ("b", 2), ("a", 2)]
    for number in range(len(asks)):
        order, _ = began(asks, room=2, cancelled=[number])
        assert len(order) == len(asks) - (number > 0)


async def test_room_may_grow_and_shrink_while_work_is_done():
    room = 2
    shares = Shares(lambda: room)
    running = []
    ends = [asyncio.Event() for _ in range(8)]

    async def work(number):
        async with shares.of("client", 2 if number == 7 else 1):
            running.append(number)
            await ends[number].wait()
        running.remove(number)

    async def after(*numbers):
        """Return what runs after the work of ``numbers``."""
        for number in numbers:
            ends[number].set()
        for _ in range(9):
            await asyncio.sleep(0)
        return sorted(running)

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for number in range(8):
            group.create_task(work(number))
        found = [await after()]
        room = 4
        found.append(await after(0))
        room = 1
        found.append(await after(1, 2, 3))
        found.append(await after(4, 5))
        found.append(await after(6))  # the last one needs 2, which is all there is and more
        await after(7)
    assert found == [[0, 1], [1, 2, 3, 4], [4], [6], [7]]
