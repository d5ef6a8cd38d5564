"""Run a function on several ranks of torch.distributed, each in its own process."""

import logging
import multiprocessing
import os
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import rl  # noqa: F401  # before anything imports torchtitan, which asks it for the device
from rl.compat.torch_internals import open_store
from rl.host.listening import listen

_context = multiprocessing.get_context("fork")


def on_ranks(
    count: int, function: Callable[..., Any], *args: Any, deadline: float = 1800.0
) -> list[Any]:
    """Return the results of ``function(*args)`` on ``count`` ranks.

    Ranks are forks of this process, so they start at once. The process must not have run a tensor
    operation, since a fork lacks its threads. Raises RuntimeError with the traceback of the first
    rank that failed, or after ``deadline`` seconds. Leaves no process behind.
    """
    store = open_store("127.0.0.1", listen("127.0.0.1", 0), deadline)
    started = []
    try:
        for rank in range(count):
            reader, writer = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_rank, args=(writer, rank, count, store.port, function, args), daemon=True
            )
            process.start()
            writer.close()
            started.append((process, reader))
        return _collect([reader for _, reader in started], time.monotonic() + deadline)
    finally:
        for process, _ in started:
            process.kill()
            process.join()


def become_rank(rank: int, count: int, port: int = 0) -> None:
    """Set what torch.distributed reads in this process's environment; ``port`` is that of a store,
    if there is one.
    """
    address = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": bool(port),
    }
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, **address}
    os.environ.update({name: str(value) for name, value in values.items()})


def _collect(readers: list[Connection], end: float) -> list[Any]:
    answers: dict[Connection, Any] = {}
    while waiting := [reader for reader in readers if reader not in answers]:
        ready = wait(waiting, timeout=max(0.0, end - time.monotonic()))
        if not ready:
            raise RuntimeError(
                f"ranks {[readers.index(reader) for reader in waiting]} did not answer in time"
            )
        for reader in ready:
            try:
                error, answers[reader] = reader.recv()
            except EOFError:
                raise RuntimeError(f"rank {readers.index(reader)} died without a word") from None
            if error:
                raise RuntimeError(
                    f"rank {readers.index(reader)} of {len(readers)} failed:\n{error}"
                )
    return [answers[reader] for reader in readers]


def _rank(
    writer: Connection, rank: int, count: int, port: int, function: Callable[..., Any], args: Any
) -> None:
    become_rank(rank, count, port)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        writer.send((None, function(*args)))
    except Exception:
        writer.send((traceback.format_exc(), None))
