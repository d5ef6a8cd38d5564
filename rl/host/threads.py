"""Threads for code that may hang."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any

from rl.errors import name_of


class DaemonThread(Executor):
    """Executor of one thread. A call that hangs does not keep the program from ending, unlike one
    in a ``ThreadPoolExecutor``.
    """

    def __init__(self, name: str = ""):
        self._name = name or None
        self._calls: SimpleQueue[tuple[Future, Callable[[], Any]] | None] = SimpleQueue()
        self._thread: Thread | None = None

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        """Call ``fn`` after the calls before it; return its result to be."""
        if self._thread is None:
            arguments = (self._calls,)
            self._thread = Thread(target=_work, args=arguments, name=self._name, daemon=True)
            self._thread.start()
        future: Future = Future()
        self._calls.put((future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        """End the thread after the calls that were submitted, without waiting for it. A later call
        starts another thread.
        """
        self._calls.put(None)
        self._calls = SimpleQueue()
        self._thread = None


def in_thread(call: Callable[..., Any], *args: Any) -> Future:
    """Call ``call`` in a thread of its own; return its result to be."""
    thread = DaemonThread()
    future = thread.submit(call, *args)
    thread.shutdown()
    return future


def _work(calls: SimpleQueue[tuple[Future, Callable[[], Any]] | None]) -> None:
    while (submitted := calls.get()) is not None:
        future, call = submitted
        if not future.set_running_or_notify_cancel():
            continue
        try:
            result = call()
        except StopIteration:  # no future of asyncio can hold it
            future.set_exception(RuntimeError(f"{name_of(call)} raised StopIteration"))
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
