"""Runs a function on several gloo ranks, each in a process of its own.

Ranks are forked from a server that has imported torchtitan once, so a launch costs little more than what it runs.
"""

import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

DEADLINE_S = 120.0

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a fork of a server whose threads have started would wait for them
_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(
    ["tests.training.scenes", "torchtitan.components.metrics", "torchtitan.components.quantization.utils"]
)


def on_ranks(count: int, function: Callable[..., Any], *args: Any, deadline: float = DEADLINE_S) -> list[Any]:
    """What ``function(*args)`` returns on each of ``count`` ranks.

    Raises AssertionError with the traceback of the rank that failed first, or the ranks that were
    silent for ``deadline`` seconds. No process is left in any case.
    """
    port = free_port()
    readers, processes = [], []
    try:
        for rank in range(count):
            reader, writer = _server.Pipe(duplex=False)
            process = _server.Process(target=_rank, args=(writer, rank, count, port, function, args), daemon=True)
            process.start()
            writer.close()
            readers.append(reader)
            processes.append(process)
        answers = _collect(readers, time.monotonic() + deadline)
        for process in processes:
            process.join(20)
        assert [process.exitcode for process in processes] == [0] * count, "a rank did not end in good order"
        return answers
    finally:
        for process in processes:
            process.kill()
            process.join()


def rank_environment(rank: int, count: int, port: int) -> dict[str, str]:
    """What torch.distributed reads."""
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in values.items()}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _collect(readers: list[Connection], end: float) -> list[Any]:
    answers: dict[int, Any] = {}
    while waiting := [reader for rank, reader in enumerate(readers) if rank not in answers]:
        ready = wait(waiting, timeout=max(0.0, end - time.monotonic()))
        silent = [rank for rank, reader in enumerate(readers) if reader in waiting]
        assert ready, f"ranks {silent} of {len(readers)} did not answer in time"
        for reader in ready:
            rank = readers.index(reader)
            try:
                failed, answers[rank] = pickle.loads(reader.recv_bytes())
            except EOFError:
                raise AssertionError(f"rank {rank} of {len(readers)} died without a word") from None
            assert not failed, f"rank {rank} of {len(readers)} failed:\n{answers[rank]}"
    return [answers[rank] for rank in range(len(readers))]


def _rank(writer: Connection, rank: int, count: int, port: int, function: Callable[..., Any], args: Any) -> None:
    os.environ.update(rank_environment(rank, count, port))
    try:
        answer = (False, function(*args))
    except BaseException:
        answer = (True, traceback.format_exc())
    writer.send_bytes(pickle.dumps(answer))  # by value: tensors shared by handle would die with this process
