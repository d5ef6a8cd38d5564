"""Runs a function on several gloo ranks, each in a process of its own.

Ranks are forked from a server that has imported torchtitan once, so a launch costs little more than
the function.
"""

import faulthandler
import os
import pickle
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, Self

from rl.compat.torch_internals import open_store
from rl.host.listening import listen
from tests.kit.layouts import LAYOUTS
from tests.warm import FORK

DEADLINE_S = 600.0


def on_ranks(
    count: int, function: Callable[..., Any], *args: Any, deadline: float = DEADLINE_S
) -> list[Any]:
    """Return the results of ``function(*args)`` on ``count`` ranks.

    Raises AssertionError with the traceback of the rank that failed first, with the exit code of a
    rank that died (negative for a signal) and its stack, or with the ranks that were silent for
    ``deadline`` seconds. No process is left in any case.
    """
    with Ranks(count, function, *args) as ranks:
        return ranks.answers(deadline)


def in_layout(function: Callable[..., Any], model: str, layout: str, *args: Any) -> list[Any]:
    """Return ``function(model, layout, *args)`` of each rank; one rank is this process."""
    ranks = LAYOUTS[layout].ranks
    if ranks == 1:
        return [function(model, layout, *args)]
    return on_ranks(ranks, function, model, layout, *args)


class Ranks:
    """``function(*args)`` running on ``count`` ranks; a context that leaves no process."""

    def __init__(self, count: int, function: Callable[..., Any], *args: Any):
        self._store = loopback_store()
        self._readers: list[Connection] = []
        self._stacks: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(count):
            reader, writer = FORK.Pipe(duplex=False)
            stack, stack_writer = FORK.Pipe(duplex=False)
            environment = rank_environment(rank, count, self._store.port)
            given = (writer, stack_writer, environment, function, args)
            process = FORK.Process(target=_rank, args=given, daemon=True)
            process.start()
            writer.close()
            stack_writer.close()
            self._readers.append(reader)
            self._stacks.append(stack)
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def answers(self, deadline: float) -> list[Any]:
        """Results by rank."""
        answers = self._collect(time.monotonic() + deadline)
        for process in self._processes:
            process.join(DEADLINE_S)
        ended_well = all(process.exitcode == 0 for process in self._processes)
        assert ended_well, "a rank did not end in good order"
        return answers

    def _collect(self, end: float) -> list[Any]:
        answers: dict[int, Any] = {}
        count = len(self._readers)
        while waiting := [r for rank, r in enumerate(self._readers) if rank not in answers]:
            ready = wait(waiting, timeout=max(0.0, end - time.monotonic()))
            silent = [rank for rank, reader in enumerate(self._readers) if reader in waiting]
            assert ready, f"ranks {silent} of {count} did not answer in time"
            for reader in ready:
                rank = self._readers.index(reader)
                try:
                    failed, answers[rank] = pickle.loads(reader.recv_bytes())
                except EOFError:
                    raise AssertionError(f"rank {rank} of {count} {self._end_of(rank)}") from None
                assert not failed, f"rank {rank} of {count} failed:\n{answers[rank]}"
        return [answers[rank] for rank in range(count)]

    def _end_of(self, rank: int) -> str:
        self._processes[rank].join(DEADLINE_S)
        stack = os.read(self._stacks[rank].fileno(), 1 << 16).decode()
        return f"died with exit code {self._processes[rank].exitcode}\n{stack}"

    def are_alive(self) -> bool:
        """Whether none has ended."""
        return all(process.is_alive() for process in self._processes)

    def kill(self) -> None:
        """SIGKILL, rank 0 first; returns when all are dead."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def loopback_store():
    """Return a store at which ranks meet, on a port that stays its own."""
    return open_store("127.0.0.1", listen("127.0.0.1", 0), DEADLINE_S)


def rank_environment(rank: int, count: int, port: int) -> dict[str, str]:
    """Variables that torch.distributed reads, of ranks that meet at the store on ``port``."""
    values = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": count,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_RESTART_COUNT": 0,
    }
    return {name: str(value) for name, value in values.items()}


def _rank(
    writer: Connection,
    stack: Connection,
    environment: dict[str, str],
    function: Callable[..., Any],
    args: Any,
) -> None:
    faulthandler.enable(stack.fileno())
    os.environ.update(environment)
    try:
        answer = (False, function(*args))
    except BaseException:
        answer = (True, traceback.format_exc())
    # by value: tensors shared by handle would die with this process
    writer.send_bytes(pickle.dumps(answer))
