"""A process of its own for the operations of clients' losses, with limits of time and memory.

An operation may end its process, as one that runs out of memory does, or compute for hours.
"""

import asyncio
import multiprocessing
import os
import resource
import signal
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from rl.actors.fork_server import end_with
from rl.tinker.errors import UserError, require
from rl.tinker.graph import Graph

LIMIT_S = 60.0
"""Time that the loss of a request may take."""
MEMORY = 4 * 2**30
"""Memory that the process may take beside the memory that its modules take."""

Datums = Sequence[tuple[np.ndarray, Mapping[str, np.ndarray]]]
"""Log-probs and inputs of each datum."""
Derivatives = tuple[list[np.ndarray], dict[str, float]]
"""Minus the derivative of the loss by each log-prob of each datum, and metrics."""


class CustomLosses:
    """Process that evaluates custom losses. The first loss starts the process, and so does the loss
    after one that ended the process. ::

        weights, metrics = await losses.differentiate(graph, datums)
    """

    def __init__(self) -> None:
        self._spawn = multiprocessing.get_context("spawn")
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection

    async def differentiate(self, graph: Graph, datums: Datums) -> Derivatives:
        """Differentiate the sum of a loss over ``datums``. One call at a time. Raises UserError."""
        if self._process is None or not self._process.is_alive():
            self._connection, theirs = self._spawn.Pipe()
            self._process = self._spawn.Process(
                target=_serve, args=(theirs, os.getpid(), MEMORY), name="custom-losses", daemon=True
            )
            self._process.start()
            theirs.close()
            await asyncio.to_thread(self._connection.recv)
        try:
            answer = await asyncio.to_thread(self._answer, graph, datums)
        except BaseException:
            self.close()
            raise
        if isinstance(answer, UserError):
            raise answer
        return answer

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()

    def _answer(self, graph: Graph, datums: Datums) -> Derivatives | UserError:
        assert self._process is not None, "it was started"
        try:
            self._connection.send((graph, datums))
            in_time = self._connection.poll(LIMIT_S)
            require(in_time, f"the loss took more than {LIMIT_S:g} s; send fewer datums at once")
            answer: Derivatives | UserError = self._connection.recv()
        except (EOFError, OSError):
            self._process.join()
            cause = signal.strsignal(-(self._process.exitcode or 0))
            return UserError(f"the loss ended its process ({cause})")
        return answer


def _serve(connection: Connection, owner: int, memory: int) -> None:
    """Answer the losses of process ``owner`` until the connection or that process ends."""
    end_with(owner)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    rows = Path("/proc/self/status").read_text().splitlines()
    (used,) = (int(row.split()[1]) << 10 for row in rows if row.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + memory,) * 2)
    connection.send("ready")
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        try:
            answer: Derivatives | UserError = differentiate(*request)
        except UserError as error:
            answer = error
        connection.send(answer)


def differentiate(graph: Graph, datums: Datums) -> Derivatives:
    """Differentiate the sum of a loss over ``datums`` in this process. Raises UserError."""
    weights = []
    metrics = {"loss:sum": 0.0}
    for number, (logprobs, inputs) in enumerate(datums):
        leaf = torch.tensor(logprobs, requires_grad=True)
        loss, returned = graph(leaf, {name: torch.tensor(array) for name, array in inputs.items()})
        try:
            (gradient,) = torch.autograd.grad(loss, leaf)
        except RuntimeError as error:
            raise UserError(f"datum {number}: the gradient of the loss failed: {error}") from None
        finite = bool(loss.isfinite() and gradient.isfinite().all())
        require(finite, f"datum {number}: the loss or its gradient is not finite")
        weights.append(-gradient.numpy())
        for name, value in {**returned, "loss:sum": loss.item()}.items():
            share = value / len(datums) if name.endswith(":mean") else value
            metrics[name] = metrics.get(name, 0.0) + share
    return weights, metrics
