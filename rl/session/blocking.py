"""A session for code that has no event loop of its own, such as a notebook."""

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable
from concurrent import futures
from contextlib import suppress
from typing import Any, Self

from rl.errors import RunError

LIFE_CYCLE = {"blocking", "close", "connect", "recover", "running", "start", "stop"}


class BlockingSession:
    """All verbs of a :class:`rl.session.session.Session`, as calls that wait for their results. ::

        session = rl.Session(config, task=task.config).blocking().open()
        rollouts = session.rollout(task, prompts, samples=8)
        ...
        session.close()

    - A ``with`` block opens and closes it too.
    - The session runs in a thread: heartbeats and restarts of generators go on between calls.
    - Calls run one after another, also calls of several threads.
    - Ctrl-C cancels the current call. The next call waits until it has ended.
    - After a model was lost, every call raises that :class:`rl.errors.RankLost`.
    """

    def __init__(self, session: Any):
        """``session`` is a :class:`rl.session.session.Session` that is not open."""
        self._session = session
        self._thread = threading.Thread(target=self._run, name="session", daemon=True)
        self._ready: futures.Future[None] = futures.Future()
        self._opened: futures.Future[None] = futures.Future()
        self._ended: futures.Future[None] = futures.Future()
        self._is_open = False
        self._is_closed = False

    def open(self) -> Self:
        """Start all processes; return this object."""
        self._thread.start()
        try:
            self._until(self._opened)
        except KeyboardInterrupt:
            self.close(at_once=True)
            raise
        return self

    def close(self, *, at_once: bool = False) -> None:
        """End all processes, ``at_once`` or after pending saves. A second call does nothing.

        Unless ``at_once``, raises the failure of a lost model, if any.
        """
        if self._thread.ident is None or self._is_closed:
            return
        self._is_closed = True
        self._ready.result()
        with suppress(RuntimeError):  # the loop has just ended
            self._loop.call_soon_threadsafe(self._life.cancel if at_once else self._leave.set)
        self._thread.join()
        if not at_once:
            self._ended.result()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(at_once=kind is not None)

    def __repr__(self) -> str:
        return repr(self._session)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in LIFE_CYCLE:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        attribute = getattr(self._session, name)
        return self._waiting(attribute) if inspect.ismethod(attribute) else attribute

    def __dir__(self) -> list[str]:
        public = {name for name in dir(self._session) if not name.startswith("_")}
        return sorted({*super().__dir__(), *(public - LIFE_CYCLE)})

    def _waiting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls ``method`` and waits for its result."""

        @functools.wraps(method)
        def wait(*args: Any, **kwargs: Any) -> Any:
            if not self._is_open:
                raise self._failure()
            call = asyncio.run_coroutine_threadsafe(self._call(method, args, kwargs), self._loop)
            try:
                return self._until(call)
            finally:
                call.cancel()  # after Ctrl-C; does nothing if the call has ended

        return wait

    def _until(self, future: "futures.Future[Any]") -> Any:
        """Return the result of ``future``; raise if the session ends first."""
        futures.wait([future, self._ended], return_when=futures.FIRST_COMPLETED)
        if future.done() and not future.cancelled():
            return future.result()
        raise self._failure()

    def _failure(self) -> BaseException:
        """Return the reason why no call is possible."""
        if self._thread.ident is None:
            return RunError("this session is not open; open it, or use it in a with block")
        failure = self._ended.exception()
        return failure.with_traceback(None) if failure else RunError("this session was closed")

    def _run(self) -> None:
        try:
            asyncio.run(self._live())
            self._ended.set_result(None)
        except BaseException as error:  # raised by every later call
            self._ended.set_exception(error)

    async def _live(self) -> None:
        life = asyncio.current_task()
        assert life is not None, "asyncio.run makes a task"
        self._life = life
        self._loop = asyncio.get_running_loop()
        self._leave = asyncio.Event()
        self._turn = asyncio.Lock()
        self._ready.set_result(None)
        async with self._session:
            self._is_open = True
            self._opened.set_result(None)
            try:
                await self._leave.wait()
            finally:
                self._is_open = False

    async def _call(self, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        async with self._turn:
            try:
                result = method(*args, **kwargs)
                return await result if inspect.isawaitable(result) else result
            except asyncio.CancelledError:
                if self._is_open:
                    await self._session.finish_cancelled()
                raise
