"""Concurrent work ends together, with its first failure."""

import asyncio

import pytest

from rl.session.concurrency import Signal, background

ENDINGS = {
    "returns": None,
    "raises": ZeroDivisionError,
    "its work fails": ValueError,
    "work that was added fails": ValueError,
    "is cancelled": asyncio.CancelledError,
}


async def forever(ended: list[str]) -> None:
    try:
        await asyncio.sleep(60)
    finally:
        ended.append("work")


async def fail(error: Exception, *, after: float = 0.0) -> None:
    await asyncio.sleep(after)
    raise error


@pytest.mark.parametrize("ending", ENDINGS)
def test_work_ends_with_the_block_and_the_first_failure_keeps_its_cause(ending):
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
