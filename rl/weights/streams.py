"""Streams of bytes between ranks over TCP: a server of pieces of buffers, and its client."""

import contextlib
import hmac
import json
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from rl.host.listening import is_loopback

HOST = "TILLER_HOST"
"""Environment variable with the name by which other ranks reach the host of this process."""
PIECE_BYTES = 4 << 20
STALL_S = 10.0
_ALIVE_S = 1.0
_STILL_WAITING = -1
_NUMBER = struct.Struct("!q")
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


def _pieces_of(buffer: Buffer, size: int) -> list[Piece]:
    """Cut a buffer of ``size`` bytes into pieces of PIECE_BYTES; the last may be smaller."""
    starts = range(0, size, PIECE_BYTES)
    return [Piece(buffer, start, min(start + PIECE_BYTES, size)) for start in starts]


class SharedBuffers:
    """Buffers that this rank fills or has filled, and whose pieces other ranks read as they arrive.

    After ``withdraw`` no byte of the memory is sent or received any more, so the memory may be
    overwritten.
    """

    def __init__(self, memory: dict[Buffer, memoryview]):
        """``memory`` has the bytes of each buffer."""
        self._memory = memory
        self.pieces = [p for buffer, view in memory.items() for p in _pieces_of(buffer, len(view))]
        """All pieces, whether they have arrived or not."""
        self._known = frozenset(self.pieces)
        self._arrived: list[Piece] = []
        self._streams: set[socket.socket] = set()
        self._withdrawn = False
        self._changed = threading.Condition()

    def view(self, piece: Piece) -> memoryview:
        """Return the memory of a piece, uint8."""
        return self._memory[piece.buffer][piece.start : piece.stop]

    def has_all(self, pieces: Iterable[Piece]) -> bool:
        """Whether all ``pieces`` have arrived or will arrive."""
        return self._known.issuperset(pieces)

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
            for connection in self._streams:
                _shut(connection)
            self._changed.wait_for(lambda: not self._streams)

    def send(self, connection: socket.socket, wanted: Sequence[Piece]) -> int:
        """Send each wanted piece after its index, in the order of arrival; return the bytes sent.

        Returns before the last piece if the buffers are withdrawn.
        """
        indices = {piece: index for index, piece in enumerate(wanted)}
        sent = seen = 0
        with self._stream(connection):
            while indices:
                with self._changed:
                    self._changed.wait_for(partial(self._has_news, seen), _ALIVE_S)
                    if self._withdrawn:
                        return sent
                    ready = self._arrived[seen:]
                    seen += len(ready)
                if not ready:
                    connection.sendall(_NUMBER.pack(_STILL_WAITING))
                for piece in ready:
                    if piece in indices:
                        index = _NUMBER.pack(indices.pop(piece))
                        connection.sendall(index, socket.MSG_MORE)
                        connection.sendall(self.view(piece))
                        sent += piece.stop - piece.start
        return sent

    def receive(
        self, address: Address, wanted: Collection[Piece], stall: float | None = None
    ) -> tuple[list[Piece], str]:
        """Receive ``wanted`` from a server; return the pieces that are missing, and the reason.

        ``stall``: seconds without a byte after which the stream ends; None for no limit.
        """
        pieces = list(wanted)
        missing = dict(enumerate(pieces))
        try:
            with _connect(address) as connection, self._stream(connection):
                _send_json(connection, ["read", pieces])
                if stall is not None:  # the kernel's limit: Python's own wakes for each packet
                    limit = struct.pack("ll", int(stall), int(stall % 1 * 1e6))
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
                index = memoryview(bytearray(_NUMBER.size))
                while missing:
                    _fill(connection, index)
                    (number,) = _NUMBER.unpack(index)
                    if number != _STILL_WAITING:
                        _fill(connection, self.view(missing[number]))
                        self.arrive([missing.pop(number)])
        except OSError as error:
            return list(missing.values()), str(error)
        return [], ""

    @contextlib.contextmanager
    def _stream(self, connection: socket.socket):
        """Use the memory in this block; ``withdraw`` shuts the connection and waits for the end."""
        with self._changed:
            if self._withdrawn:
                raise ConnectionAbortedError("the buffers were withdrawn")
            self._streams.add(connection)
        try:
            yield
        finally:
            with self._changed:
                self._streams.discard(connection)
                self._changed.notify_all()

    def _has_news(self, seen: int) -> bool:
        return self._withdrawn or len(self._arrived) > seen


class Server:
    """A rank's server: answers questions in JSON, and streams the pieces of its buffers.

    Its threads answer while the process computes. It listens on all addresses of the host, or on
    loopback only if the host's name is a loopback address.
    """

    def __init__(self, answers: dict[str, Callable[..., Any]]):
        """``answers`` has a function for each kind of question, which is called in a thread."""
        self._answers = answers
        self._slots: dict[int, SharedBuffers] = {}
        self.bytes_sent = 0
        self._lock = threading.Lock()
        host = os.environ.get(HOST, "127.0.0.1")
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        own = (host if is_loopback(host) else "", 0)
        self._listener = socket.create_server(own, family=family, backlog=2048)
        port = self._listener.getsockname()[1]
        self.address = Address(host, port, secrets.token_hex(_TOKEN_BYTES // 2))
        threading.Thread(target=self._accept, daemon=True).start()

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
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):  # the other end has gone
            connection.settimeout(STALL_S)
            token = bytearray(_TOKEN_BYTES)
            _fill(connection, memoryview(token))
            if not hmac.compare_digest(token, self.address.token.encode()):
                return
            kind, arguments = _receive_json(connection)
            connection.settimeout(None)
            if kind != "read":
                _send_json(connection, self._answers[kind](*arguments))
                return
            wanted = [Piece(Buffer(*buffer), start, stop) for buffer, start, stop in arguments]
            offered = list(self._slots.values())
            buffers = next((each for each in offered if each.has_all(wanted)), None)
            if buffers is not None:
                sent = buffers.send(connection, wanted)
                with self._lock:
                    self.bytes_sent += sent


def ask(address: Address, kind: str, *arguments: Any) -> Any:
    """Return a server's answer. Raises OSError if the server does not answer."""
    with _connect(address) as connection:
        connection.settimeout(STALL_S)
        _send_json(connection, [kind, arguments])
        return _receive_json(connection)


def _connect(address: Address) -> socket.socket:
    connection = socket.create_connection((address.host, address.port), timeout=STALL_S)
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(address.token.encode())
    return connection


def _send_json(connection: socket.socket, value: Any) -> None:
    text = json.dumps(value).encode()
    connection.sendall(_NUMBER.pack(len(text)) + text)


def _receive_json(connection: socket.socket) -> Any:
    size = memoryview(bytearray(_NUMBER.size))
    _fill(connection, size)
    text = bytearray(_NUMBER.unpack(size)[0])
    _fill(connection, memoryview(text))
    return json.loads(text)


def _fill(connection: socket.socket, memory: memoryview) -> None:
    """Fill ``memory`` from the connection, in one call of the kernel without the GIL."""
    while memory:
        count = connection.recv_into(memory, 0, socket.MSG_WAITALL)
        if not count:
            raise ConnectionResetError("the other end closed the connection")
        memory = memory[count:]


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other end has gone
        connection.shutdown(socket.SHUT_RDWR)
