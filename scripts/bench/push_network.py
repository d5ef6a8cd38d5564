"""The pushes over TCP and through communicators against plain sockets and torch.distributed's own
send and receive, and the bytes that leave the trainer, in one run.

Usage: python scripts/bench/push_network.py [--rounds N] [--json]

A trainer rank and the generators are processes with addresses of their own on the loopback of a
network namespace, or of this machine if namespaces are not allowed. In each round every generator
fetches a version, first one generator, then two, then four. By turns with the single fetch, the
same processes send as many bytes over one and over two plain sockets, from memory to memory: the
faster of the two is the limit of the link. So do ``dist.send`` and ``dist.recv`` of gloo, in one
message, which is the limit of the collective transport. The copy into the generator's parameters is
not part of any side. Every generator compares what it fetched with the trainer's weights.
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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, NamedTuple

os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")

import torch
import torch.distributed as dist

from rl.model.shards import Box, Region, Shard, layout_of
from rl.weights.streams import HOST
from rl.weights.tcp import TcpPublisher
from rl.weights.transport import Transfer, TransportName, open_publisher, open_subscriber

TRANSPORTS: tuple[TransportName, ...] = ("tcp", "collective")
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
    subscriber = open_subscriber(transfer, addresses, shards, rank=0, generator=number)
    room = torch.zeros(sum(shard.tensor.nbytes for shard in shards), dtype=torch.uint8)
    memory = room.numpy().data

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

    def join(port: int) -> float:
        join_group(port, rank=1)
        return 0.0

    def own_receive() -> float:
        dist.barrier()
        begun = time.perf_counter()
        dist.recv(room, 0)
        return time.perf_counter() - begun

    does: dict[str, Any] = {"fetch": fetch, "pull": pull, "plain": plain}
    does |= {"join": join, "dist": own_receive}
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


def join_group(port: int, rank: int) -> None:
    """Join torch.distributed's group of the trainer and the first generator."""
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)


def join_groups(generator: Generator) -> None:
    """Make the group in this process and in the generator's."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    generator.begin("join", port)
    join_group(port, rank=0)
    generator.answer()


def dist_seconds(generator: Generator, room: torch.Tensor) -> float:
    """Return the seconds in which ``generator`` receives ``room`` by ``dist.recv``."""
    generator.begin("dist")
    dist.barrier()
    dist.send(room, 1)
    return generator.answer()


class Push:
    """Trainer with ``count`` generators, and the versions pushed between them so far."""

    def __init__(self, shards: list[Shard], transport: TransportName, count: int, ends: ExitStack):
        layout = (layout_of(shards),)
        transfer = Transfer(transport, torch.bfloat16, layout, layout, count)
        self._shards = shards
        self.publisher: TcpPublisher = open_publisher(transfer, shards, rank=0)  # type: ignore[assignment]
        ends.callback(self.publisher.close)
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
    # not zeros: the kernel would send one page of its own again and again, from a cache
    room = torch.ones(2 * rows * WIDTH * PARAMETERS, dtype=torch.uint8)
    over_tcp = measure_transport("tcp", shards, room, rounds)
    collective = measure_transport("collective", shards, room, rounds)
    return {
        "bytes": room.nbytes,
        "fetch_over_sockets": over_tcp.over_limit,
        "fetch_over_sockets_spread": over_tcp.spread,
        "link_gb_per_s": over_tcp.limit_gb_per_s,
        "fetch_s": over_tcp.fetch_s,
        "sent_over_model": over_tcp.sent_over_model,
        "collective_over_plain": collective.over_limit,
        "collective_over_plain_spread": collective.spread,
        "plain_gb_per_s": collective.limit_gb_per_s,
        "collective_fetch_s": collective.fetch_s,
        "collective_sent_over_model": collective.sent_over_model,
    }


class Measured(NamedTuple):
    """Figures of a transport."""

    over_limit: float
    spread: list[float]
    limit_gb_per_s: float
    fetch_s: dict[int, float]
    sent_over_model: dict[int, float]


def measure_transport(
    transport: TransportName, shards: list[Shard], room: torch.Tensor, rounds: int
) -> Measured:
    with ExitStack() as ends:
        pushes = {count: Push(shards, transport, count, ends) for count in GENERATORS}
        for push in pushes.values():
            push.seconds()
        before = {count: push.publisher.bytes_sent for count, push in pushes.items()}
        first = pushes[1].generators[0]
        limits: list[Callable[[], float]] = [
            partial(plain_seconds, first, room.numpy().data, streams) for streams in STREAMS
        ]
        if transport == "collective":
            join_groups(first)
            ends.callback(dist.destroy_process_group)
            limits = [partial(dist_seconds, first, room)]
        ours: dict[int, list[float]] = {count: [] for count in GENERATORS}
        plain: list[list[float]] = [[] for _ in limits]
        for _ in range(rounds):
            for seconds, limit in zip(plain, limits, strict=True):
                seconds.append(limit())
            for count, push in pushes.items():
                ours[count].append(push.seconds())
        sent = {
            count: (push.publisher.bytes_sent - before[count]) / rounds / room.nbytes
            for count, push in pushes.items()
        }
    fastest = min(plain, key=statistics.median)
    ratios = [own / other for own, other in zip(ours[1], fastest, strict=True)]
    return Measured(
        over_limit=statistics.median(ratios),
        spread=[min(ratios), max(ratios)],
        limit_gb_per_s=room.nbytes / 1e9 / statistics.median(fastest),
        fetch_s={count: statistics.median(each) for count, each in ours.items()},
        sent_over_model=sent,
    )


def show(result: dict[str, Any]) -> None:
    print(f"{result['bytes'] / 1e9:.2f} GB; plain sockets: {result['link_gb_per_s']:.2f} GB/s")
    print(f"torch.distributed's send and receive over gloo: {result['plain_gb_per_s']:.2f} GB/s")
    for name, key in (("TCP", ""), ("communicators", "collective_")):
        of = f"{key}over_plain" if key else "fetch_over_sockets"
        low, high = result[f"{of}_spread"]
        print(f"a fetch over {name} against these: {result[of]:.2f} ({low:.2f} to {high:.2f})")
        for count, seconds in result[f"{key}fetch_s"].items():
            sent = result[f"{key}sent_over_model"][count]
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
