"""Push by torch.distributed's send and receive: NCCL between GPUs, gloo on CPU."""

import contextlib
import select
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from socket import socket
from typing import Any, NamedTuple

import torch

from rl.compat.torch_internals import join_store, open_store, pair
from rl.model.shards import Shard
from rl.weights.streams import (
    STALL_S,
    Address,
    Link,
    Server,
    connect,
    listen,
    receive_json,
    send_json,
)
from rl.weights.tcp import TcpPublisher, TcpSubscriber
from rl.weights.transport import beside, on_side_stream

WINDOW = 4  # pieces on the way at once
POLL_S = 0.0002


class LaneServer(Server):
    """Server that sends pieces through a communicator with each reader that asks for one."""

    def memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(torch.uint8)

    def _answer(self, connection: socket, kind: str, arguments: list[Any]) -> None:
        if kind != "lane":
            super()._answer(connection, kind, arguments)
            return
        host, port, name = arguments
        with contextlib.suppress(RuntimeError):  # the reader has gone
            store = join_store(host, port, STALL_S)
            lane = Lane(connection, store, name, rank=0, device=self._device)
            try:
                while True:
                    _, pieces = receive_json(connection)
                    self._send(lane, pieces)
            finally:
                lane.close()


class CollectivePublisher(TcpPublisher):
    """Publisher whose readers receive through communicators: see TcpPublisher for the protocol.

    Each reader has a communicator with each rank that it reads from, made when it first reads and
    kept for later pushes. So a generator that is lost takes no other one along, and one that joins
    late waits for no other one. Runs of pieces, and questions, travel over TCP beside it; the
    end of that connection tells each side that the other one has gone.

    Weights are cast and packed on the trainer's GPU and stay there; readers receive on their GPU
    and keep a copy in pinned host memory, since vLLM has the GPU's. No test runs CUDA.
    """

    on_device = True
    server = LaneServer


class CollectiveSubscriber(TcpSubscriber):
    """Subscriber that receives through communicators, and serves others: see
    CollectivePublisher.
    """

    server = LaneServer
    _streams = 1

    def __init__(self, addresses: Sequence[Any], shards: Sequence[Shard], *args: Any, **more: Any):
        """Accept the arguments of PackedSubscriber."""
        self._device = shards[0].tensor.device
        self._lanes: dict[Address, Lane] = {}
        host, listener = listen()
        self._store_at = host, listener.getsockname()[1]
        self._store = open_store(host, listener, STALL_S)
        super().__init__(addresses, shards, *args, **more)

    def close(self) -> None:
        super().close()
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()

    @contextlib.contextmanager
    def _link(self, address: Address, stall: float | None) -> Iterator[Link]:
        lane = self._lanes.pop(address, None)
        if lane is None or lane.has_ended():
            connection = connect(address)
            name = uuid.uuid4().hex
            send_json(connection, ["lane", [*self._store_at, name]])
            lane = Lane(connection, self._store, name, rank=1, device=self._device)
        lane.limit(stall or self._timeout_s)
        try:
            yield lane
        except BaseException:
            lane.close()
            raise
        self._lanes[address] = lane


class _Move(NamedTuple):
    work: Any
    there: torch.Tensor
    """Memory that the communicator sends from or receives into."""
    into: torch.Tensor | None
    """Memory to copy ``there`` to."""
    then: Callable[[], None]


class Lane(Link):
    """Link whose memory travels through a communicator of the two ranks; runs travel over TCP.

    Sends and receives start in the order of the pieces, and WINDOW of them are under way.
    """

    def __init__(
        self, connection: socket, store: Any, name: str, *, rank: int, device: torch.device
    ):
        """Return once the other end, of the other ``rank``, does the same."""
        super().__init__(connection)
        self._device = device
        self._peer = 1 - rank
        self._stall = STALL_S
        self._moves: deque[_Move] = deque()
        self._is_shut = False
        self._news = select.poll()  # select() takes no descriptor above 1,023
        self._news.register(connection, select.POLLIN)
        host = connection.getsockname()[0]
        try:
            self._group = pair(store, name, rank, device, host, STALL_S)
        except RuntimeError as error:
            connection.close()
            raise ConnectionError(f"no communicator with the other rank: {error}") from None

    def limit(self, stall: float | None) -> None:
        super().limit(stall)
        self._stall = stall or STALL_S

    def send(self, run: range, memories: Sequence[Any] = ()) -> None:
        if not memories:
            super().send(run)
        for place, memory in enumerate(memories):
            super().send(run[place : place + 1])  # it fails after ``shut``
            with on_side_stream(self._device):
                there = memory.to(self._device, non_blocking=True)
                work = self._group.send([there], self._peer, 0)
            self._track(_Move(work, there, None, lambda: None))

    def run(self) -> range:
        while self._moves and not self._has_news():
            self._end_first()  # a reader below this one waits for it
        return super().run()

    def receive(self, memories: Sequence[Any], then: Callable[[], None]) -> None:
        (memory,) = memories  # the other end sends runs of one piece
        is_there = memory.device == self._device
        with on_side_stream(self._device):
            there = memory if is_there else torch.empty_like(memory, device=self._device)
            work = self._group.recv([there], self._peer, 0)
        self._track(_Move(work, there, None if is_there else memory, then))

    def finish(self) -> None:
        while self._moves:
            self._end_first()

    def leave(self) -> None:
        if self._moves:
            self.close()  # a communicator that is gone touches no memory

    def shut(self) -> None:
        self._is_shut = True
        super().shut()

    def close(self) -> None:
        """End the link and its communicator."""
        self.shut()
        if self._device.type == "cuda" and self._group is not None:
            self._group.abort()
        self._moves.clear()
        self._group = None
        self.connection.close()

    def has_ended(self) -> bool:
        """Whether the other end has closed the link, over which nothing is on the way."""
        return self._has_news()

    def _has_news(self) -> bool:
        return bool(self._news.poll(0))

    def _track(self, move: _Move) -> None:
        self._moves.append(move)
        while len(self._moves) > WINDOW:
            self._end_first()

    def _end_first(self) -> None:
        work, there, into, then = self._moves[0]
        try:
            self._await(work)
        except RuntimeError as error:
            raise ConnectionError(f"the communicator failed: {error}") from None
        if into is not None:
            with beside(self._device):
                into.copy_(there, non_blocking=True)
        self._moves.popleft()
        then()

    def _await(self, work: Any) -> None:
        """Wait until ``work`` is done. Raises RuntimeError if the other end has gone."""
        if self._device.type != "cuda":
            work.wait(timedelta(seconds=self._stall))
            return
        ends = time.monotonic() + self._stall
        while not work.is_completed():  # NCCL does not notice that the other end has gone
            if self._is_shut or time.monotonic() > ends:
                raise RuntimeError("the peer stopped responding")
            time.sleep(POLL_S)
