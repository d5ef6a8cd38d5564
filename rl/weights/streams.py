"""Streams of bytes between ranks over TCP: a server of pieces of buffers, and its client."""

import contextlib
import hmac
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch

from rl.host.listening import is_loopback

HOST = "TILLER_HOST"
"""Environment variable with the name by which other ranks reach the host of this process."""
PIECE_BYTES = 4 << 20
TOGETHER = 16
"""Number of pieces that a rank without readers receives in one call of the kernel: between two
calls the sender waits, which costs more than the call."""
STALL_S = 10.0
ACCEPT_AGAIN_S = 0.1
_ALIVE_S = 1.0
_SIZE = struct.Struct("!q")
_RUN = struct.Struct("!qq")
_TOKEN_BYTES = 32


class Address(NamedTuple):
    """Address of a rank's server, and the secret without which the server does not answer."""

    host: str
    port: int
    token: str


class Buffer(NamedTuple):
    """Name of a buffer of one push: a blob of trainer rank ``source``, or the delta of a blob."""

    source: int
    sequence: int
    blob: int
    is_delta: bool


class Piece(NamedTuple):
    """Bytes ``start`` to ``stop`` of a buffer."""

    buffer: Buffer
    start: int
    stop: int


class Link:
    """Connection of a reader and a server, over which runs of pieces travel.

    All methods raise OSError if the peer has gone or stopped responding.
    """

    def __init__(self, connection: socket.socket):
        self.connection = connection

    def limit(self, stall: float | None) -> None:
        """End the link after ``stall`` seconds without a byte; None for no limit."""
        if stall is not None:  # the kernel's limit: Python's own wakes for each packet
            limit = struct.pack("ll", int(stall), int(stall % 1 * 1e6))
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def ask(self, pieces: list[Piece]) -> None:
        """Ask for pieces. The server sends them in runs, in any order."""
        send_json(self.connection, ["read", pieces])

    def send(self, run: range, memories: Sequence[Any] = ()) -> None:
        """Send a run, and then the memory of its pieces, at the latest in ``finish``.

        A run has the indices of pieces that follow each other in what the reader asked for. An
        empty run tells the reader to wait.
        """
        more = socket.MSG_MORE if memories else 0
        self.connection.sendall(_RUN.pack(run.start, run.stop), more)
        for memory in memories:
            self.connection.sendall(memory)

    def run(self) -> range:
        """Receive a run. The memory of its pieces follows."""
        packed = memoryview(bytearray(_RUN.size))
        _fill(self.connection, packed)
        return range(*_RUN.unpack(packed))

    def receive(self, memories: Sequence[Any], then: Callable[[], None]) -> None:
        """Fill ``memories`` in order and call ``then``, at the latest in ``finish``."""
        _fill(self.connection, *memories)
        then()

    def finish(self) -> None:
        """Return when all memory was sent or filled."""

    def leave(self) -> None:
        """Let go of all memory that is not sent or filled yet."""

    def shut(self) -> None:
        """End the link; the thread that uses it gets an error."""
        _shut(self.connection)


@contextlib.contextmanager
def linked(address: Address, stall: float | None = None):
    """Yield a link to a server, of this block alone."""
    with connect(address) as connection:
        link = Link(connection)
        link.limit(stall)
        yield link


class SharedBuffers:
    """Buffers that this rank fills or has filled, and whose pieces other ranks read as they arrive.

    After ``withdraw`` no byte of the memory is sent or received any more, so the memory may be
    overwritten.
    """

    def __init__(self, memory: dict[Buffer, Any]):
        """``memory`` has the bytes of each buffer, as the links take them."""
        self._memory = memory
        self.pieces = [
            Piece(buffer, start, min(start + PIECE_BYTES, len(view)))
            for buffer, view in memory.items()
            for start in range(0, len(view), PIECE_BYTES)
        ]
        """All pieces, whether they have arrived or not."""
        self.known = frozenset(self.pieces)
        self._arrived: list[Piece] = []
        self._streams: set[Link] = set()
        self._has_readers = False
        self._withdrawn = False
        self._changed = threading.Condition()

    def view(self, piece: Piece) -> Any:
        """Return the memory of a piece, uint8."""
        return self._memory[piece.buffer][piece.start : piece.stop]

    def arrive(self, pieces: Iterable[Piece]) -> None:
        """Make ``pieces`` readable."""
        with self._changed:
            self._arrived.extend(pieces)
            self._changed.notify_all()

    def withdraw(self) -> None:
        """End all streams, also those that begin later; return after the last one has ended."""
        with self._changed:
            self._withdrawn = True
            self._changed.notify_all()
            for link in self._streams:
                link.shut()
            self._changed.wait_for(lambda: not self._streams)

    def send(self, link: Link, wanted: Sequence[Piece]) -> int:
        """Send the wanted pieces in runs, as the pieces arrive; return the bytes sent.

        Returns before the last piece if the buffers are withdrawn.
        """
        indices = {piece: index for index, piece in enumerate(wanted)}
        sent = seen = 0
        self._has_readers = True
        with self._stream(link):
            while indices:
                with self._changed:
                    self._changed.wait_for(partial(self._has_news, seen), _ALIVE_S)
                    if self._withdrawn:
                        return sent
                    ready = self._arrived[seen:]
                    seen += len(ready)
                if not ready:
                    link.send(range(0))
                for run in _runs_of(indices.pop(piece) for piece in ready if piece in indices):
                    views = [self.view(piece) for piece in wanted[run.start : run.stop]]
                    link.send(run, views)
                    sent += sum(map(len, views))
            link.finish()
        return sent

    def receive(
        self, linked: AbstractContextManager[Link], wanted: Collection[Piece]
    ) -> tuple[list[Piece], str]:
        """Receive ``wanted`` over a link; return the pieces that are missing, and the reason."""
        pieces = list(wanted)
        missing = dict(enumerate(pieces))
        try:
            with linked as link, self._stream(link):
                link.ask(pieces)
                left = len(pieces)
                while left:
                    run = link.run()
                    left -= len(run)
                    while run:
                        now = run[: 1 if self._has_readers else TOGETHER]
                        views = [self.view(pieces[number]) for number in now]
                        link.receive(views, partial(self._keep, missing, now))
                        run = run[len(now) :]
                link.finish()
        except OSError as error:
            return list(missing.values()), str(error)
        return [], ""

    def _keep(self, missing: dict[int, Piece], numbers: Iterable[int]) -> None:
        self.arrive([missing.pop(number) for number in numbers])

    @contextlib.contextmanager
    def _stream(self, link: Link):
        """Use the memory in this block; ``withdraw`` shuts the link and waits for the end."""
        with self._changed:
            if self._withdrawn:
                raise ConnectionAbortedError("the buffers were withdrawn")
            self._streams.add(link)
        try:
            yield
        finally:
            link.leave()
            with self._changed:
                self._streams.discard(link)
                self._changed.notify_all()

    def _has_news(self, seen: int) -> bool:
        return self._withdrawn or len(self._arrived) > seen


def _runs_of(numbers: Iterable[int]) -> Iterator[range]:
    """Return ``numbers`` in runs."""
    ordered = sorted(numbers)
    for _, run in groupby(enumerate(ordered), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        yield range(members[0], members[-1] + 1)


class Server:
    """A rank's server: answers questions in JSON, and streams the pieces of its buffers.

    Its threads answer while the process computes. It listens on all addresses of the host, or on
    loopback only if the host's name is a loopback address.
    """

    def __init__(self, answers: dict[str, Callable[..., Any]], device: Any = None):
        """``answers`` has a function for each kind of question, which is called in a thread. The
        weights are on ``device``.
        """
        self._answers = answers
        self._device = device
        self._slots: dict[int, SharedBuffers] = {}
        self.bytes_sent = 0
        self._lock = threading.Lock()
        host, self._listener = listen()
        port = self._listener.getsockname()[1]
        self.address = Address(host, port, secrets.token_hex(_TOKEN_BYTES // 2))
        threading.Thread(target=self._accept, daemon=True).start()

    def memory(self, tensor: torch.Tensor) -> Any:
        """Return the bytes of ``tensor`` as the links take them."""
        return tensor.view(torch.uint8).numpy().data

    def offer(self, slot: int, buffers: SharedBuffers) -> None:
        """Serve ``buffers`` as those of a slot, which must be empty."""
        self._slots[slot] = buffers

    def withdraw(self, slot: int) -> None:
        """End all streams of the buffers in a slot, if any, and empty the slot."""
        if slot in self._slots:
            self._slots[slot].withdraw()
            del self._slots[slot]

    def close(self) -> None:
        """End all streams and stop listening."""
        _shut(self._listener)  # wakes the thread that accepts
        self._listener.close()
        for slot in list(self._slots):
            self.withdraw(slot)

    def _accept(self) -> None:
        while self._listener.fileno() >= 0:
            try:
                accepted = self._listener.accept()[:1]
                threading.Thread(target=self._serve, args=accepted, daemon=True).start()
            except (OSError, RuntimeError):  # too many open files or threads, or closed
                time.sleep(ACCEPT_AGAIN_S)

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):  # the other end has gone
            connection.settimeout(STALL_S)
            token = bytearray(_TOKEN_BYTES)
            _fill(connection, memoryview(token))
            if not hmac.compare_digest(token, self.address.token.encode()):
                return
            kind, arguments = receive_json(connection)
            connection.settimeout(None)
            self._answer(connection, kind, arguments)

    def _answer(self, connection: socket.socket, kind: str, arguments: list[Any]) -> None:
        if kind == "read":
            self._send(Link(connection), arguments)
        else:
            send_json(connection, self._answers[kind](*arguments))

    def _send(self, link: Link, pieces: list[Any]) -> None:
        """Send pieces over a link, if a slot has or will have all of them."""
        wanted = [Piece(Buffer(*buffer), start, stop) for buffer, start, stop in pieces]
        offered = list(self._slots.values())
        buffers = next((shared for shared in offered if shared.known.issuperset(wanted)), None)
        if buffers is None:
            raise ConnectionAbortedError("the pieces are not here")
        sent = buffers.send(link, wanted)
        with self._lock:
            self.bytes_sent += sent


def listen() -> tuple[str, socket.socket]:
    """Return the name by which other ranks reach this host, and a socket that listens there."""
    host = os.environ.get(HOST, "127.0.0.1")
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    address = (host if is_loopback(host) else "", 0)
    return host, socket.create_server(address, family=family, backlog=2048)


def ask(address: Address, kind: str, *arguments: Any) -> Any:
    """Return a server's answer. Raises OSError if the server does not answer."""
    with connect(address) as connection:
        connection.settimeout(STALL_S)
        send_json(connection, [kind, arguments])
        return receive_json(connection)


def connect(address: Address) -> socket.socket:
    """Return a connection to a server, which knows that this rank belongs to the push."""
    connection = socket.create_connection((address.host, address.port), timeout=STALL_S)
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(address.token.encode())
    return connection


def send_json(connection: socket.socket, value: Any) -> None:
    """Send ``value`` as JSON, after its size."""
    text = json.dumps(value).encode()
    connection.sendall(_SIZE.pack(len(text)) + text)


def receive_json(connection: socket.socket) -> Any:
    """Receive what ``send_json`` sends."""
    size = memoryview(bytearray(_SIZE.size))
    _fill(connection, size)
    text = bytearray(_SIZE.unpack(size)[0])
    _fill(connection, memoryview(text))
    return json.loads(text)


def _fill(connection: socket.socket, *memories: memoryview) -> None:
    """Fill ``memories`` from the connection, in one call of the kernel without the GIL."""
    left = deque(memories)
    while left:
        count = connection.recvmsg_into(left, 0, socket.MSG_WAITALL)[0]
        if not count:
            raise ConnectionResetError("the other end closed the connection")
        while left and count >= len(left[0]):
            count -= len(left.popleft())
        if count:
            left[0] = left[0][count:]


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other end has gone
        connection.shutdown(socket.SHUT_RDWR)
