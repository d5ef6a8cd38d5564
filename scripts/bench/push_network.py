"""The push over TCP against plain sockets, and the bytes that leave the trainer, in one run.

Usage: python scripts/bench/push_network.py [--rounds N] [--json]

A trainer rank and the generators are processes with addresses of their own on the loopback of a
network namespace, or of this machine if namespaces are not allowed. In each round every generator
fetches a version, first one generator, then two, then four. By turns with the single fetch, the
same processes send as many bytes over one and over two plain sockets, from memory to memory: the
faster of the two is the limit of the link. The copy into the generator's parameters is not part of
either side. Every generator compares what it fetched with the trainer's weights.
"""

import argparse
import asyncio
import contextlib
import json
import os
import pickle
import socket
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch

from rl.model.shards import Box, Region, Shard, layout_of
from rl.weights.streams import HOST
from rl.weights.tcp import TcpPublisher, TcpSubscriber
from rl.weights.transport import Transfer

GENERATORS = (1, 2, 4)
STREAMS = (1, 2)
PIECE_BYTES = 4 << 20
PARAMETERS = 32
WIDTH = 1024
INSIDE = "--inside"
GENERATOR = "--generator"
PATIENCE_S = 60.0


class Generator:
    """Generator of one rank in a process of its own."""

    def __init__(self, number: int, transfer: Transfer, addresses: list[Any]):
        self._process = subprocess.Popen(
            [sys.executable, __file__, GENERATOR],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {HOST: f"127.0.0.{number + 2}"},
        )
        self._send((number, transfer, addresses))

    def begin(self, name: str, *arguments: Any) -> None:
        self._send((name, arguments))

    def answer(self) -> Any:
        """Return the answer to the oldest call. Raises EOFError if the process has ended."""
        return pickle.load(self._process.stdout)  # type: ignore[arg-type]

    def close(self) -> None:
        self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait(PATIENCE_S)

    def _send(self, value: Any) -> None:
        pickle.dump(value, self._process.stdin)  # type: ignore[arg-type]
        self._process.stdin.flush()  # type: ignore[union-attr]


def generate() -> None:
    """Answer the trainer's process until that process closes the pipe."""
    number, transfer, addresses = pickle.load(sys.stdin.buffer)
    shards = [
        Shard(region, torch.zeros(region.box.shape, dtype=transfer.dtype))
        for region in transfer.wanted[0]
    ]
    subscriber = TcpSubscriber(addresses, shards, transfer, rank=0, generator=number)
    memory = memoryview(bytearray(sum(shard.tensor.nbytes for shard in shards)))

    def fetch(version: int) -> float:
        begun = time.perf_counter()
        asyncio.run(subscriber.fetch(version))
        return time.perf_counter() - begun

    def pull(version: int, expected: float) -> bool:
        subscriber.pull(version)
        return all(bool((shard.tensor == expected).all()) for shard in shards)

    def plain(address: tuple[str, int], streams: int) -> float:
        begun = time.perf_counter()
        with ThreadPoolExecutor(streams) as pool:
            list(pool.map(lambda part: receive(address, part), parts(memory, streams)))
        return time.perf_counter() - begun

    does = {"fetch": fetch, "pull": pull, "plain": plain}
    with closing(subscriber), contextlib.suppress(EOFError):
        while True:
            name, arguments = pickle.load(sys.stdin.buffer)
            pickle.dump(does[name](*arguments), sys.stdout.buffer)
            sys.stdout.buffer.flush()


def parts(memory: memoryview, count: int) -> list[memoryview]:
    size = -(-len(memory) // count)
    return [memory[start : start + size] for start in range(0, len(memory), size)]


def receive(address: tuple[str, int], memory: memoryview) -> None:
    with socket.create_connection(address) as connection:
        while memory:
            memory = memory[connection.recv_into(memory, 0, socket.MSG_WAITALL) :]


def send(listener: socket.socket, memory: memoryview) -> None:
    connection, _ = listener.accept()
    with connection:
        for start in range(0, len(memory), PIECE_BYTES):
            connection.sendall(memory[start : start + PIECE_BYTES])


def plain_seconds(generator: Generator, memory: memoryview, streams: int) -> float:
    """Return the seconds in which ``generator`` receives ``memory`` over plain sockets."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        ThreadPoolExecutor(streams) as pool,
    ):
        generator.begin("plain", listener.getsockname(), streams)
        sending = [pool.submit(send, listener, part) for part in parts(memory, streams)]
        for each in sending:
            each.result()
        return generator.answer()


class Push:
    """Trainer with ``count`` generators, and the versions pushed between them so far."""

    def __init__(self, shards: list[Shard], count: int, ends: ExitStack):
        layout = (layout_of(shards),)
        transfer = Transfer("tcp", torch.bfloat16, layout, layout, count)
        self._shards = shards
        self.publisher = ends.enter_context(closing(TcpPublisher(shards, transfer, rank=0)))
        addresses = [self.publisher.address]
        self.generators = [
            ends.enter_context(closing(Generator(number, transfer, addresses)))
            for number in range(count)
        ]
        self._version = 0

    def seconds(self) -> float:
        """Push a version; return the seconds of the slowest fetch.

        Raises RuntimeError unless every generator has the trainer's weights.
        """
        self._version += 1
        for shard in self._shards:
            shard.tensor.fill_(self._version)
        asyncio.run(self.publisher.publish(self._version))
        slowest = max(self._all("fetch", self._version))
        if not all(self._all("pull", self._version, float(self._version))):
            raise RuntimeError("a generator lacks what the trainer pushed: nothing was measured")
        return slowest

    def _all(self, name: str, *arguments: Any) -> list[Any]:
        for generator in self.generators:
            generator.begin(name, *arguments)
        return [generator.answer() for generator in self.generators]


def measure(rounds: int, megabytes: int) -> dict[str, Any]:
    rows = megabytes * 1_000_000 // (2 * WIDTH * PARAMETERS)
    shape = (rows, WIDTH)
    whole = Box.whole(shape)
    shards = [Shard(Region(f"p{n}", shape, whole), torch.zeros(shape)) for n in range(PARAMETERS)]
    size = 2 * rows * WIDTH * PARAMETERS
    memory = memoryview(bytearray(size))
    with ExitStack() as ends:
        pushes = {count: Push(shards, count, ends) for count in GENERATORS}
        for push in pushes.values():
            push.seconds()
        before = {count: push.publisher.bytes_sent for count, push in pushes.items()}
        first = pushes[1].generators[0]
        ours: dict[int, list[float]] = {count: [] for count in GENERATORS}
        plain: dict[int, list[float]] = {streams: [] for streams in STREAMS}
        for _ in range(rounds):
            for streams in STREAMS:
                plain[streams].append(plain_seconds(first, memory, streams))
            for count, push in pushes.items():
                ours[count].append(push.seconds())
        sent = {
            count: (push.publisher.bytes_sent - before[count]) / rounds / size
            for count, push in pushes.items()
        }
    link = min(plain.values(), key=statistics.median)
    ratios = [own / other for own, other in zip(ours[1], link, strict=True)]
    return {
        "bytes": size,
        "over_link": statistics.median(ratios),
        "over_link_spread": [min(ratios), max(ratios)],
        "link_gb_per_s": size / 1e9 / statistics.median(link),
        "fetch_s": {count: statistics.median(each) for count, each in ours.items()},
        "sent_over_model": sent,
    }


def show(result: dict[str, Any]) -> None:
    low, high = result["over_link_spread"]
    print(f"{result['bytes'] / 1e9:.2f} GB; plain sockets: {result['link_gb_per_s']:.2f} GB/s")
    print(f"a fetch over plain sockets: {result['over_link']:.2f} ({low:.2f} to {high:.2f})")
    for count, seconds in result["fetch_s"].items():
        sent = result["sent_over_model"][count]
        print(f"{count} generators: {seconds:.3f} s, the trainer sends {sent:.2f} x the model")


def enter_namespace() -> None:
    """Start this program again in a network namespace, if that is allowed."""
    unshare = ["unshare", "--map-root-user", "--net"]
    if subprocess.run([*unshare, "ip", "link", "set", "lo", "up"], check=False).returncode:
        print("Network namespaces are not allowed here: the loopback is the machine's own.")
        return
    inside = 'ip link set lo up && exec "$0" "$@"'
    os.execvp("unshare", [*unshare, "sh", "-c", inside, sys.executable, *sys.argv, INSIDE])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--megabytes", type=int, default=400, help="size of the weights in bfloat16"
    )
    parser.add_argument(INSIDE, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    parser.add_argument(GENERATOR, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.generator:
        generate()
        return
    if not options.inside:
        enter_namespace()
    result = measure(options.rounds, options.megabytes)
    show(result)
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
