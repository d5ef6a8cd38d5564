"""A generator on a host and in a process of its own, which fetches version 0."""

import asyncio
import os
import threading
from multiprocessing.connection import Connection
from typing import Any

from rl.weights import streams, tcp
from rl.weights.streams import SharedBuffers
from rl.weights.tcp import TcpSubscriber
from tests.weights.network import RANKS, live_parts, same

PIECE_BYTES = 64
STALL_S = 1.0
HANGS_S = 3600.0


def read(says: Connection, host: str, inputs: tuple[Any, ...]) -> None:
    """Fetch, say ``got`` and the bytes so far at each piece, at last ``exact`` and whether the
    parameters are right, and serve other readers until this process is killed.
    """
    os.environ[streams.HOST] = host
    asyncio.run(_read(says, *inputs))


async def _read(
    says: Connection, moved: Any, addresses: list[Any], number: int, weights: Any
) -> None:
    streams.PIECE_BYTES = PIECE_BYTES
    tcp.STALL_S = STALL_S
    arrive = SharedBuffers.arrive
    got = 0
    lock = threading.Lock()

    def noted(buffers, pieces):
        nonlocal got
        arrive(buffers, pieces)
        with lock:
            got += sum(piece.stop - piece.start for piece in pieces)
            says.send(f"got {got}")

    SharedBuffers.arrive = noted
    subscribers = [
        TcpSubscriber(addresses, live_parts(rank), moved, rank=rank, generator=number)
        for rank in range(RANKS)
    ]
    await asyncio.gather(*(subscriber.fetch(0) for subscriber in subscribers))
    for subscriber in subscribers:
        subscriber.pull(0)
    exact = all(same(each._shards, weights, rank) for rank, each in enumerate(subscribers))
    says.send(f"exact {exact}")
    await asyncio.sleep(HANGS_S)
