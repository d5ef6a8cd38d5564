"""Calls of many callers to one rank as few messages: see :class:`Gathered`."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import count
from typing import Any, Generic, NamedTuple, TypeVar

GATHER_S = 0.002
"""Time for which calls, and answers, wait for others that travel in the same message."""
Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


class Outcome(NamedTuple, Generic[Answer]):
    """Answer to the call ``number``, or the exception that it raises; a part of the answer unless
    ``is_last``.
    """

    number: int
    answer: Answer | Exception
    is_last: bool = True


class Gathered(Generic[Asked, Answer]):
    """Side of the callers. ::

        calls = Gathered(send)      # has the rank return ``await answers.of(batch)``
        answer = await calls.make(asked)

    Calls that come within GATHER_S are one message. Each ends as soon as its own answer is there.
    A failure of ``send`` fails all calls in flight.
    """

    def __init__(
        self, send: Callable[[list[tuple[int, Asked]]], Awaitable[Sequence[Outcome[Answer]]]]
    ):
        self._send = send
        self._numbers = count()
        self._new: dict[int, Asked] = {}
        self._in_flight: dict[int, asyncio.Future[Answer]] = {}
        self._hearers: dict[int, Callable[[Any], None]] = {}
        self._messages = set[asyncio.Task[None]]()

    async def make(self, asked: Asked, on_part: Callable[[Any], None] | None = None) -> Answer:
        """Return the answer. A call that is cancelled before it is sent is never sent. ``on_part``
        is called with the parts of the answer that come before.
        """
        loop = asyncio.get_running_loop()
        number = next(self._numbers)
        if not self._new:
            loop.call_later(GATHER_S, self._begin)
        self._new[number] = asked
        answer = self._in_flight[number] = loop.create_future()
        if on_part is not None:
            self._hearers[number] = on_part
        try:
            return await answer
        finally:
            self._in_flight.pop(number, None)
            self._hearers.pop(number, None)

    def _begin(self) -> None:
        """Send what is new, and wait for answers, which the message before no longer does."""
        batch = [
            (number, asked) for number, asked in self._new.items() if number in self._in_flight
        ]
        self._new.clear()
        if self._in_flight:
            message = asyncio.get_running_loop().create_task(self._exchange(batch))
            self._messages.add(message)

    async def _exchange(self, batch: list[tuple[int, Asked]]) -> None:
        try:
            outcomes = await self._send(batch)
        except Exception as failure:
            self._new.clear()
            outcomes = [Outcome(number, failure) for number in self._in_flight]
        for number, answer, is_last in outcomes:
            if not is_last:
                if number in self._hearers:  # what it raises is its own
                    asyncio.get_running_loop().call_soon(self._hearers[number], answer)
                continue
            call = self._in_flight.pop(number, None)
            if call is None or call.done():  # its caller was cancelled
                continue
            if isinstance(answer, Exception):
                call.set_exception(answer)
            else:
                call.set_result(answer)
        self._messages.discard(asyncio.current_task())  # type: ignore[arg-type]
        if not (self._messages or self._new):
            self._begin()


class Answers(Generic[Asked, Answer]):
    """Side of the rank. ``start`` begins a call, and may call its second argument, in any thread,
    with parts of the answer. ``fails`` raises what all calls fail with.
    """

    def __init__(
        self,
        start: Callable[[Asked, Callable[[Any], object]], "Future[Answer]"],
        fails: Callable[[], object],
    ):
        self._start = start
        self._fails = fails
        self._running = set[int]()
        self._finished: list[Outcome[Answer]] = []
        self._changed = asyncio.Event()

    async def of(self, batch: Sequence[tuple[int, Asked]]) -> list[Outcome[Answer]]:
        """Start the calls of a batch. Return the outcomes since the message before: once there is
        one, or at the next message.
        """
        self._wake()
        for number, asked in batch:
            try:
                answer = asyncio.wrap_future(self._start(asked, self._hearer(number)))
            except Exception as error:
                failed: Outcome[Answer] = Outcome(number, error)
                self._finished.append(failed)
                continue
            self._running.add(number)
            answer.add_done_callback(partial(self._finish, number))
        if self._running and not self._finished:
            await self._changed.wait()
        self._fails()
        finished = self._finished
        self._finished = []
        return finished

    def _finish(self, number: int, answer: "asyncio.Future[Answer]") -> None:
        self._running.remove(number)
        error = answer.exception()
        outcome: Answer | Exception = error if isinstance(error, Exception) else answer.result()
        self._keep(Outcome(number, outcome))

    def _hearer(self, number: int) -> Callable[[Any], object]:
        """Return what takes parts of an answer, in any thread."""
        call = asyncio.get_running_loop().call_soon_threadsafe
        return lambda part: call(self._keep, Outcome(number, part, is_last=False))

    def _keep(self, outcome: Outcome[Answer]) -> None:
        if not self._finished:
            asyncio.get_running_loop().call_later(GATHER_S, self._deliver)
        self._finished.append(outcome)

    def _deliver(self) -> None:
        if self._finished:  # a later message has not taken them
            self._wake()

    def _wake(self) -> None:
        """Have the messages so far return what has finished."""
        self._changed.set()
        self._changed = asyncio.Event()
