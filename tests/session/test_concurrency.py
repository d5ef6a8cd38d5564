"""Concurrent work ends together, with its first failure."""

import asyncio

import pytest

from rl.session.concurrency import Signal, background


async def forever(ended: list[str]) -> None:
    try:
        await asyncio.sleep(60)
    finally:
        ended.append("work")


async def fail(error: Exception, *, after: float = 0.0) -> None:
    await asyncio.sleep(after)
    raise error


def test_work_ends_with_the_block():
    async def main():
        ended: list[str] = []
        async with background(forever(ended)):
            await asyncio.sleep(0)
        return ended

    assert asyncio.run(main()) == ["work"]


def test_first_failure_ends_the_block_and_the_work_and_keeps_its_cause():
    async def main():
        ended: list[str] = []
        first = ValueError("first")
        first.__cause__ = KeyError("before it")
        with pytest.raises(ValueError, match="first") as error:
            async with background(
                forever(ended), fail(first), fail(TypeError("second"), after=0.1)
            ):
                await asyncio.sleep(60)
        return ended, error.value.__cause__

    ended, cause = asyncio.run(main())
    assert ended == ["work"]
    assert isinstance(cause, KeyError)


def test_exception_of_the_block_ends_the_work():
    async def main():
        ended: list[str] = []
        with pytest.raises(ZeroDivisionError):
            async with background(forever(ended)):
                await asyncio.sleep(0)
                raise ZeroDivisionError
        return ended

    assert asyncio.run(main()) == ["work"]


def test_added_work_that_fails_ends_the_rest():
    async def main():
        with pytest.raises(ValueError, match="late"):
            async with background() as work:
                work.create_task(fail(ValueError("late")))
                await asyncio.sleep(60)

    asyncio.run(main())


def test_cancellation_from_outside_is_raised():
    async def block(ended):
        async with background(forever(ended)):
            await asyncio.sleep(60)

    async def main():
        ended: list[str] = []
        task = asyncio.ensure_future(block(ended))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return ended

    assert asyncio.run(main()) == ["work"]


def test_signal_wakes_only_tasks_with_a_true_condition():
    async def main():
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
        return woken

    assert asyncio.run(main()) == [0, 1, 2]
