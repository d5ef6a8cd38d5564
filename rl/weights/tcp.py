"""Push between hosts over TCP: readers serve on what they have read."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

from rl.model.shards import Shard
from rl.weights.packed import PackedPublisher, PackedSubscriber, Read, is_whole
from rl.weights.streams import (
    STALL_S,
    Address,
    Buffer,
    Link,
    Piece,
    Server,
    SharedBuffers,
    ask,
    linked,
)
from rl.weights.transport import Transfer, TransferFailed, VersionGone

STREAMS = 2  # from one server: a second one hides the work of the first one's kernel
MAX_STREAMS = 8  # of a reader at once
_OWN = 0  # slot of a reader's copy
KEPT = 2  # pushes that readers may be fetching


class TcpPublisher(PackedPublisher):
    """Publisher that serves its slots over TCP: see PackedPublisher for the protocol.

    Ranks of different generators that want the same bytes form a tree (RelayTree). A reader serves
    each piece on as soon as it has the piece, so that the last reader of a chain is only a few
    pieces behind the first. The bytes that leave the trainer do not depend on the number of hosts
    with generators.

    - A reader whose parent ends, hangs, or has other bytes reads the rest from the trainer. The
      readers below it keep their parents.
    - Only intact memory is sent: all streams of a slot, or of a reader's copy, end before it is
      overwritten. A reader also compares the trainer's headers after its last piece. So the bytes
      of a parent belong to the version.
    - Only ranks of this push have the token that the servers want.
    """

    server: type[Server] = Server

    def __init__(self, shards: Sequence[Shard], transfer: Transfer, *, rank: int):
        """Allocate the slots for the ``shards`` of trainer rank ``rank``, and listen."""
        super().__init__(shards, transfer, rank=rank)
        self._rank = rank
        self._ranks = len(transfer.wanted)  # of a generator
        answers: dict[str, Callable[..., Any]] = {
            "header": self._rows,
            "parent": self._parent,
        }
        self._server = self.server(answers, self._like.device)
        self.address = self._server.address
        self._tree = RelayTree(transfer.fan_out, self.address.host)

    @property
    def bytes_sent(self) -> int:
        """Number of bytes of weights that this rank has sent."""
        return self._server.bytes_sent

    def close(self) -> None:
        super().close()
        self._server.close()

    async def _put_header(self, slot: int) -> None:
        if is_whole(row := self._rows()[slot]):
            self._server.offer(slot, self._buffers(slot, row[0]))
        else:
            await asyncio.to_thread(self._server.withdraw, slot)

    def _buffers(self, slot: int, sequence: int) -> SharedBuffers:
        memory: dict[Buffer, Any] = {}
        codes = zip(self._deltas[slot], self._delta_sizes(slot), strict=True)
        for blob, (whole, (code, size)) in enumerate(zip(self._slots[slot], codes, strict=True)):
            memory[Buffer(self._rank, sequence, blob, False)] = self._server.memory(whole)
            if size:
                code = self._server.memory(code)[:size]
                memory[Buffer(self._rank, sequence, blob, True)] = code
        buffers = SharedBuffers(memory)
        buffers.arrive(buffers.pieces)
        return buffers

    def _rows(self) -> list[list[int]]:
        return self._header.tolist()

    def _parent(self, reader: int, sequence: int, address: list[Any]) -> Address | None:
        return self._tree.place(reader, reader % self._ranks, sequence, Address(*address))


class TcpSubscriber(PackedSubscriber):
    """Subscriber that reads from a parent or from the trainer, and serves others: see
    TcpPublisher.
    """

    server: type[Server] = Server
    _addresses: Sequence[Address]
    _streams = STREAMS

    def __init__(self, addresses: Sequence[Any], shards: Sequence[Shard], *args: Any, **more: Any):
        """Accept the arguments of PackedSubscriber."""
        self._server = self.server({}, shards[0].tensor.device)
        super().__init__(addresses, shards, *args, **more)

    def _link(self, address: Address, stall: float | None) -> AbstractContextManager[Link]:
        return linked(address, stall)

    def _make_staging(self) -> None:
        self._server.withdraw(_OWN)
        super()._make_staging()

    def close(self) -> None:
        self._server.close()
        super().close()

    async def _headers(self) -> list[torch.Tensor]:
        ranks = range(len(self._addresses))
        rows = [asyncio.to_thread(self._ask, rank, "header") for rank in ranks]
        return [torch.tensor(header) for header in await asyncio.gather(*rows)]

    async def _read(self, reads: list[Read]) -> None:
        if not reads:
            return
        await asyncio.to_thread(self._server.withdraw, _OWN)
        memory: dict[Buffer, Any] = {}
        for read in reads:
            buffer = Buffer(read.source, read.sequence, read.blob, bool(read.delta))
            memory[buffer] = self._server.memory(read.into)[: read.delta or None]
        buffers = SharedBuffers(memory)
        self._server.offer(_OWN, buffers)
        await asyncio.to_thread(self._receive, buffers, reads)

    def _receive(self, buffers: SharedBuffers, reads: list[Read]) -> None:
        left = sorted(buffers.pieces, key=lambda piece: (piece.start, piece.buffer))
        with ThreadPoolExecutor(MAX_STREAMS) as pool:
            parent = self._ask(
                reads[0].source, "parent", self._reader, reads[0].sequence, self._server.address
            )
            if parent:
                parts = [left[first :: self._streams] for first in range(self._streams)]
                answers = pool.map(
                    lambda part: buffers.receive(self._link(Address(*parent), STALL_S), part),
                    parts,
                )
                left = [piece for missing, _ in answers for piece in missing]
            left.sort(key=lambda piece: piece.buffer)
            jobs = [
                (source, part[first :: self._streams])
                for source, pieces in groupby(left, lambda piece: piece.buffer.source)
                for part in [list(pieces)]
                for first in range(self._streams)
            ]
            list(pool.map(lambda job: self._from_trainer(buffers, *job), jobs))

    def _from_trainer(self, buffers: SharedBuffers, source: int, pieces: list[Piece]) -> None:
        missing, why = buffers.receive(self._link(self._addresses[source], None), pieces)
        if not missing:
            return
        sequences = [row[0] for row in self._ask(source, "header")]
        if missing[0].buffer.sequence not in sequences:
            raise VersionGone(f"trainer rank {source} overwrote the version during the fetch")
        raise TransferFailed(f"a stream from {self._name(source)} ended: {why}")

    def _ask(self, rank: int, kind: str, *arguments: Any) -> Any:
        try:
            return ask(self._addresses[rank], kind, *arguments)
        except OSError as error:
            raise TransferFailed(f"{self._name(rank)} cannot be reached: {error}") from None

    def _name(self, rank: int) -> str:
        address = self._addresses[rank]
        return f"trainer rank {rank} at {address.host}:{address.port}"


@dataclass(slots=True, eq=False)
class _Node:
    address: Address | None
    """Address of its server; None for the trainer."""
    host: str
    parent: "_Node | None" = None

    def is_below(self, other: "_Node") -> bool:
        """Whether ``other`` is this node's parent, or the parent of that node, and so on."""
        node = self.parent
        while node is not None and node is not other:
            node = node.parent
        return node is not None


@dataclass(slots=True)
class RelayTree:
    """Tree of the readers that want the same bytes of a push, with the trainer as its root.

    Readers take their places in the order in which they begin. Each host has one reader that reads
    from another host; the others of the host read from readers there. A node serves up to
    ``fan_out`` hosts, and up to ``fan_out`` readers of its own host. So the bytes that leave the
    trainer's host do not depend on the number of readers. With ``fan_out`` 1 the tree is a chain.
    """

    fan_out: int
    host: str
    """Host of the trainer rank."""
    _trees: dict[tuple[int, int], dict[int, _Node]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def place(self, reader: int, group: int, sequence: int, address: Address) -> Address | None:
        """Give a reader a place in the tree of its ``group`` and push; return the address of its
        parent, None for the trainer.

        A reader that asks again has lost what it had, so it gets a new place, below none of its
        own descendants: each would wait for the other.
        """
        with self._lock:
            for key in [key for key in self._trees if key[0] <= sequence - 2 * KEPT]:
                del self._trees[key]  # sequence numbers of pushes differ by 2
            root = {-1: _Node(None, self.host)}
            tree = self._trees.setdefault((sequence, group), root)
            node = tree.pop(reader, None) or _Node(address, address.host)
            node.address = address  # the readers below it keep it as their parent
            node.host = address.host
            node.parent = self._parent(tree, node)
            tree[reader] = node
            return node.parent.address if node.parent else None

    def _parent(self, tree: dict[int, _Node], child: _Node) -> _Node | None:
        """Return the first node that can serve one more reader and is not below ``child``, if
        possible on the host of ``child``; None if no such node exists.
        """
        parents = [(node.parent, node.host) for node in tree.values() if node.parent is not None]
        near = Counter(parent for parent, host in parents if parent.host == host)
        far = Counter(parent for parent, host in parents if parent.host != host)
        first: dict[str, _Node] = {}
        nodes = [node for node in tree.values() if not node.is_below(child)]
        for node in nodes:
            first.setdefault(node.host, node)
            if node.host == child.host and near[node] < self.fan_out:
                return node
        for node in first.values():
            if node.host != child.host and far[node] < self.fan_out:
                return node
        return None
