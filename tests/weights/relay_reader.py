"""A generator in a process of its own: ``python -m tests.weights.relay_reader``.

Reads a pickle of its inputs from standard input, fetches version 0 and prints ``got`` with the
bytes so far, at last ``exact`` and whether its parameters are right.
"""

import asyncio
import pickle
import sys
import threading

from rl.weights import streams, tcp
from rl.weights.streams import Shelf
from rl.weights.tcp import TcpSubscriber
from tests.weights.network import RANKS, live_parts, same

PIECE_BYTES = 64
STALL_S = 1.0
HANGS_S = 3600.0


async def main() -> None:
    moved, addresses, number, weights = pickle.load(sys.stdin.buffer)
    streams.PIECE_BYTES = PIECE_BYTES
    tcp.STALL_S = STALL_S
    arrive = Shelf.arrive
    got = 0
    lock = threading.Lock()

    def noted(shelf, pieces):
        nonlocal got
        arrive(shelf, pieces)
        with lock:
            got += sum(piece.stop - piece.start for piece in pieces)
            print("got", got, flush=True)

    Shelf.arrive = noted
    subscribers = [
        TcpSubscriber(addresses, live_parts(rank), moved, rank=rank, generator=number)
        for rank in range(RANKS)
    ]
    await asyncio.gather(*(subscriber.fetch(0) for subscriber in subscribers))
    for subscriber in subscribers:
        subscriber.pull(0)
    exact = all(same(each._shards, weights, rank) for rank, each in enumerate(subscribers))
    print("exact", exact, flush=True)
    await asyncio.sleep(HANGS_S)  # other readers read from this one until the test ends it


if __name__ == "__main__":
    asyncio.run(main())
