"""Push over TCP and communicators: readers serve each other, and what arrives is exact."""

import asyncio
import os
import random
import resource
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from rl.weights import collective, streams, tcp
from rl.weights.streams import Address, Buffer, Link, Server, SharedBuffers, ask
from rl.weights.tcp import RelayTree
from rl.weights.transport import VersionGone
from tests.warm import FORK
from tests.weights.network import (
    RANKS,
    change,
    copied,
    initial,
    live_parts,
    same,
    trainer_parts,
    transfer,
)
from tests.weights.ranks import of_transport

WAIT_S = 60.0
PIECE_BYTES = 64


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(streams, "PIECE_BYTES", PIECE_BYTES)


@pytest.fixture(params=["tcp", "collective"])
def transport(request):
    return request.param


@pytest.fixture
def opened(monkeypatch, transport):
    """Return a function that opens publishers and, by generator, subscribers on hosts."""
    with ExitStack() as ends:

        def make(weights, hosts, **options):
            moved = transfer(**{"generators": len(hosts), **options})
            publishers = [
                of_transport(transport, "Publisher")(trainer_parts(weights, rank), moved, rank=rank)
                for rank in range(RANKS)
            ]
            addresses = [publisher.address for publisher in publishers]
            generators = []
            for number, host in enumerate(hosts):
                monkeypatch.setenv(streams.HOST, f"127.0.0.{host}")
                generators.append(
                    [
                        of_transport(transport, "Subscriber")(
                            addresses, live_parts(rank), moved, rank=rank, generator=number
                        )
                        for rank in range(RANKS)
                    ]
                )
            monkeypatch.delenv(streams.HOST, raising=False)
            for end in (*publishers, *(each for ranks in generators for each in ranks)):
                ends.callback(end.close)
            return publishers, generators

        yield make


async def publish(publishers, version) -> int:
    """Return the bytes that a generator reads."""
    return sum([(await publisher.publish(version)).bytes_sent for publisher in publishers])


async def pull(generators, version) -> None:
    await asyncio.gather(*(each.fetch(version) for ranks in generators for each in ranks))
    for ranks in generators:
        for subscriber in ranks:
            subscriber.pull(version)


async def sent_in_all(publishers, expected: int) -> int:
    """Return the bytes that were sent. A sender counts them after a reader may have them all."""
    async with asyncio.timeout(WAIT_S):
        while (sent := sum(publisher.bytes_sent for publisher in publishers)) < expected:
            await asyncio.sleep(0.01)
    return sent


def hold(generators, weights) -> bool:
    return all(
        same(subscriber._shards, weights, rank)
        for ranks in generators
        for rank, subscriber in enumerate(ranks)
    )


@pytest.mark.parametrize("delta", [False, True])
async def test_bytes_out_of_the_trainer_do_not_depend_on_the_number_of_generators(opened, delta):
    for hosts in ([2], [2, 3, 4, 5], [2, 2, 3, 3]):
        weights = initial()
        publishers, generators = opened(weights, hosts, delta=delta)
        expected = 0
        for version in range(3):
            expected += await publish(publishers, version)
            await pull(generators, version)
            assert hold(generators, weights)
            change(weights, 0.01, seed=version)
        assert await sent_in_all(publishers, expected) == expected


async def test_with_a_fan_out_the_trainer_sends_to_as_many_hosts(opened):
    weights = initial()
    publishers, generators = opened(weights, [2, 3, 4, 5], fan_out=3)
    size = await publish(publishers, 0)
    await pull(generators, 0)
    assert hold(generators, weights)
    assert await sent_in_all(publishers, 3 * size) == 3 * size


async def test_a_reader_of_an_older_version_is_not_served_a_newer_one(opened):
    weights = initial()
    publishers, (first, second) = opened(weights, [2, 3], timeout_s=0.0)
    older = copied(weights)
    await publish(publishers, 0)
    for subscriber in (*first, *second):
        subscriber._timeout_s = WAIT_S
    await pull([first], 0)
    change(weights, 1.0, seed=0)
    await publish(publishers, 1)
    await pull([first], 1)
    await pull([second], 0)  # its parent has the newer version
    assert hold([first], weights)
    assert hold([second], older)
    await publish(publishers, 2)
    with pytest.raises(VersionGone, match="trainer rank 0 holds 1 and 2"):
        await second[0].fetch(0)


def half_served(publisher) -> SharedBuffers:
    """Have a publisher serve half of its only push; return the buffers, which lack the rest."""
    ((slot, whole),) = publisher._server._slots.items()
    half = SharedBuffers(whole._memory)
    half.arrive(half.pieces[::2])
    publisher._server.offer(slot, half)
    return half


async def test_a_version_that_is_overwritten_during_a_fetch_is_gone(opened):
    publishers, ((subscriber, _),) = opened(initial(), [2], timeout_s=0.0)
    subscriber._timeout_s = WAIT_S
    await publish(publishers, 0)
    for publisher in publishers:
        half_served(publisher)
    fetching = asyncio.create_task(subscriber.fetch(0))
    while not (slots := subscriber._server._slots) or not slots[0]._arrived:
        await asyncio.sleep(0.01)
    await publish(publishers, 1)
    await publish(publishers, 2)
    with pytest.raises(VersionGone, match="overwrote the version"):
        await fetching


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
async def test_readers_after_one_that_ends_or_hangs_get_the_whole_version(opened, transport, fate):
    async def said_by(reader) -> str:
        _, says = reader
        return await asyncio.to_thread(says.recv)

    def start_reader(transport, addresses, number, weights):
        """Start the process of a generator on a host of its own; return it and what it says."""
        here, there = FORK.Pipe(duplex=False)
        inputs = (transport, transfer(generators=3, timeout_s=WAIT_S), addresses, number, weights)
        arguments = there, f"127.0.0.{number + 2}", inputs
        process = FORK.Process(target=read, args=arguments, daemon=True)
        process.start()
        there.close()
        return process, here

    weights = initial()
    publishers, _ = opened(weights, [], generators=3)
    whole = await publish(publishers, 0)
    halves = [half_served(publisher) for publisher in publishers]
    half = sum(
        (piece.stop - piece.start) * len(publisher.blobs[piece.buffer.blob].readers)
        for publisher, buffers in zip(publishers, halves, strict=True)
        for piece in buffers.pieces[::2]
    )
    addresses = [publisher.address for publisher in publishers]
    readers = []
    try:
        for number in range(3):
            readers.append(start_reader(transport, addresses, number, weights))
            while await said_by(readers[-1]) != f"got {half}":
                pass
        os.kill(readers[0][0].pid, fate)
        for buffers in halves:
            buffers.arrive(buffers.pieces[1::2])
        for reader in readers[1:]:
            while (said := await said_by(reader)).startswith("got"):
                pass
            assert said == "exact True"
    finally:
        for process, _ in readers:
            process.kill()
            process.join()
    assert sum(publisher.bytes_sent for publisher in publishers) <= 2 * whole - half


def read(says: Connection, host: str, inputs: tuple[Any, ...]) -> None:
    """Fetch, say ``got`` and the bytes so far at each piece, at last ``exact`` and whether the
    parameters are right, and serve other readers until this process is killed.
    """
    os.environ[streams.HOST] = host
    asyncio.run(_read(says, *inputs))


async def _read(
    says: Connection, transport: str, moved: Any, addresses: list[Any], number: int, weights: Any
) -> None:
    streams.PIECE_BYTES = PIECE_BYTES
    collective.STALL_S = tcp.STALL_S = 1.0
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
        of_transport(transport, "Subscriber")(
            addresses, live_parts(rank), moved, rank=rank, generator=number
        )
        for rank in range(RANKS)
    ]
    await asyncio.gather(*(subscriber.fetch(0) for subscriber in subscribers))
    for subscriber in subscribers:
        subscriber.pull(0)
    exact = all(same(each._shards, weights, rank) for rank, each in enumerate(subscribers))
    says.send(f"exact {exact}")
    await asyncio.sleep(3600)


def test_memory_is_not_sent_after_it_was_withdrawn():
    memory = torch.zeros(8 << 20, dtype=torch.uint8)
    buffer = Buffer(0, 2, 0, False)
    buffers = SharedBuffers({buffer: memoryview(memory.numpy())})
    buffers.arrive(buffers.pieces)
    here, there = socket.socketpair()
    with ThreadPoolExecutor(1) as pool, here, there:
        sending = pool.submit(buffers.send, Link(here), buffers.pieces)
        there.recv(1, socket.MSG_PEEK)  # it has begun
        buffers.withdraw()
        memory.fill_(255)
        assert isinstance(sending.exception(WAIT_S), OSError)
        received = bytearray(len(memory))
        size = 0
        while count := there.recv_into(memoryview(received)[size:]):
            size += count
    assert size < len(memory)
    assert b"\xff" not in received[16:size]


@pytest.mark.parametrize("has_reader", [False, True])
def test_pieces_arrive_together_unless_a_reader_waits_for_them(has_reader):
    buffer = Buffer(0, 2, 0, False)
    given = random.Random(0).randbytes(40 * PIECE_BYTES + 1)
    whole = SharedBuffers({buffer: memoryview(given)})
    whole.arrive(whole.pieces)
    copies = [bytearray(len(given)) for _ in range(2)]
    relay, last = (SharedBuffers({buffer: memoryview(copy)}) for copy in copies)
    arrivals = []
    arrive = relay.arrive
    relay.arrive = lambda pieces: (arrivals.append(len(pieces)), arrive(pieces))
    sends = threading.Event()
    stream = relay._stream
    relay._stream = lambda link: (sends.set(), stream(link))[1]
    with ThreadPoolExecutor(3) as pool, ExitStack() as ends:

        def flow(source: SharedBuffers, into: SharedBuffers):
            """Begin to send all pieces; return the function that receives them."""
            here, there = (ends.enter_context(end) for end in socket.socketpair())
            pool.submit(source.send, Link(here), source.pieces)
            return lambda: into.receive(nullcontext(Link(there)), source.pieces)

        below = pool.submit(flow(relay, last)) if has_reader else None
        assert below is None or sends.wait(WAIT_S)
        assert flow(whole, relay)() == ([], "")
        assert below is None or below.result(WAIT_S) == ([], "")
    assert arrivals == ([1] * 41 if has_reader else [16, 16, 9])
    assert copies == ([given, given] if has_reader else [given, bytes(len(given))])


def test_a_server_answers_only_requests_with_its_token():
    server = Server({"double": lambda number: 2 * number})
    try:
        assert ask(server.address, "double", 4) == 8
        with pytest.raises(ConnectionResetError):
            ask(server.address._replace(token="0" * 32), "double", 4)
    finally:
        server.close()


def test_a_server_goes_on_after_connections_that_it_could_not_accept():
    server = Server({"double": lambda number: 2 * number})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        with socket.socket() as first, socket.socket() as waiting:
            free = os.dup(first.fileno())
            os.close(free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))  # none can be opened
            for client in (first, waiting):
                client.settimeout(WAIT_S)
                client.connect((server.address.host, server.address.port))
                client.sendall(server.address.token.encode())
                streams.send_json(client, ["double", [4]])
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert [streams.receive_json(client) for client in (first, waiting)] == [8, 8]
        assert ask(server.address, "double", 5) == 10
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        server.close()


def test_each_host_reads_once_from_another_host():
    def placed(fan_out, hosts):
        tree = RelayTree(fan_out, "t")
        return tree, [parent_in(tree, reader, host) for reader, host in enumerate(hosts)]

    assert placed(1, "abcd")[1] == [None, 0, 1, 2]
    assert placed(1, "aabbab")[1] == [None, 0, 0, 2, 1, 3]
    assert placed(1, "tata")[1] == [None, None, 0, 1]
    assert placed(2, "abcdef")[1] == [None, None, 0, 0, 1, 1]
    assert placed(9, "abcd")[1] == [None] * 4
    tree, _ = placed(1, "abc")
    assert parent_in(tree, 0, "a") is None  # it was started again
    assert parent_in(tree, 3, "d") == 2
    assert parent_in(tree, 4, "d", push=4) is None
    tree, _ = placed(1, "aa")
    assert [parent_in(tree, reader, "a") for reader in (0, 1, 0, 1)] == [None, 0] * 2


def parent_in(tree: RelayTree, reader: int, host: str, push: int = 2) -> int | None:
    """Give a reader a place; return its parent."""
    parent = tree.place(reader, 0, push, Address(host, reader, ""))
    return None if parent is None else parent.port


@pytest.mark.parametrize("hosts", ["aa", "ab", "aab", "abc", "aabbcc"])
@pytest.mark.parametrize("fan_out", [1, 2])
def test_no_two_readers_wait_for_each_other_whoever_asks_again(hosts, fan_out):
    tree = RelayTree(fan_out, "t")
    parents = dict[int, int | None]()
    rng = random.Random(hosts)
    readers = [*range(len(hosts))]
    for reader in readers + rng.choices(readers, k=200):
        above = parents[reader] = parent_in(tree, reader, hosts[reader])
        for _ in readers:
            above = None if above is None else parents[above]
        assert above is None
