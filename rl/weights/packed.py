"""Push over a network: the protocol between trainer ranks' blobs and generator ranks' copies."""

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from rl.errors import RunError
from rl.model.digest import bits_of
from rl.model.shards import Shard, layout_of
from rl.weights.routes import plan_blobs
from rl.weights.transport import (
    SLOTS,
    Sent,
    Transfer,
    TransferFailed,
    VersionGone,
    check_dtype,
    copy_all,
)

BLOCK = 1 << 16  # elements of a delta's block: as many as uint16 can index
# columns of a header: from the last on, the bytes of each blob's delta
_SEQUENCE = 0
_VERSION = 1
_DELTAS = 2


class PackedPublisher:
    """A trainer rank's side of a push over a network.

    Blobs are packed in the generator's dtype into two slots alternately. A slot's header holds the
    version and a sequence number, which is odd while the slot is written and 2n + 2 when it holds
    push n. A reader

    - reads the headers, then the blobs into its own memory, then the headers again. Equal headers
      prove that nothing was written in between; otherwise the fetch is refused. So no torn value
      reaches a parameter.
    - copies in ``pull`` from its own memory, whatever the publishers do meanwhile. ::

        publisher = ...(shards, transfer, rank=)     # trainer rank, in an endpoint of its actor
        subscriber = ...(addresses, shards, transfer, rank=)     # generator rank
        sent = await publisher.publish(v)           # when all trainer ranks have returned:
        await subscriber.fetch(v)                                     # generation goes on
        subscriber.pull(v)                                            # generation pauses

    A publish waits for no reader: a caller that knows of a fetch of the version before the newest
    one waits for its end. A reader whose version is overwritten gets VersionGone, which names the
    versions that exist. All ranks of a generator must hold the same version, so a fetch never
    chooses another version by itself.

    With ``delta``, each blob is compared with the blob in the other slot. If the code of the
    changes is at most half as large, readers that hold the previous push fetch only the code; all
    others fetch the whole blob. Memory: two slots, each no larger than the rank's shards in
    ``dtype``, and half of that again with ``delta``. On CUDA, which no test covers, this is pinned
    host memory, or memory of the GPU if ``on_device``.
    """

    on_device = False

    def __init__(self, shards: Sequence[Shard], transfer: Transfer, *, rank: int):
        """Allocate the slots for the ``shards`` of trainer rank ``rank``."""
        dtype = transfer.dtype
        self.blobs = plan_blobs(transfer.sources, transfer.wanted)[rank]
        self._like = shards[0].tensor
        device = self._like.device
        self._header = torch.zeros(SLOTS, _DELTAS + len(self.blobs), dtype=torch.int64)
        make = _device_memory if self.on_device else _host_memory
        self._slots = [
            [make(blob.numel, dtype, device) for blob in self.blobs] for _ in range(SLOTS)
        ]
        self._deltas = [
            [make(_delta_bytes(whole, transfer), torch.uint8, device) for whole in slot]
            for slot in self._slots
        ]
        self._copies = [
            [
                (view, shards[piece.held].part(piece.box))
                for blob, whole in zip(self.blobs, slot, strict=True)
                for piece, view in zip(blob.pieces, blob.views(whole), strict=True)
            ]
            for slot in self._slots
        ]
        # pushes of two publishers are never confused, not even after a restart
        self._push = time.time_ns()
        # one thread: a cancelled publish ends before the next one packs
        self._packer = ThreadPoolExecutor(1)

    async def publish(self, version: int) -> Sent:
        """Make the current weights readable as ``version``.

        They must not change before this returns.
        """
        slot = self._push % SLOTS
        row = self._header[slot]
        row[_SEQUENCE] = 2 * self._push + 1
        await self._put_header(slot)
        await asyncio.get_running_loop().run_in_executor(self._packer, self._pack, slot)
        await self._put_slot(slot)
        row[_VERSION] = version
        row[_SEQUENCE] += 1
        self._push += 1  # at once: a number that was shown as whole is never given again
        await self._put_header(slot)
        parts = [*zip(self.blobs, self._slots[slot], self._delta_sizes(slot), strict=True)]
        full = sum(whole.nbytes * len(blob.readers) for blob, whole, _ in parts)
        sent = sum((size or whole.nbytes) * len(blob.readers) for blob, whole, size in parts)
        return Sent(full, sent)

    def close(self) -> None:
        """Release all resources; subscribers fail from here on."""
        self._packer.shutdown()

    async def _put_header(self, slot: int) -> None:
        """Publish the slot's row of the header, if readers do not read this process's memory."""

    async def _put_slot(self, slot: int) -> None:
        """Publish the slot's blobs and deltas, if readers do not read this process's memory."""

    def _pack(self, slot: int) -> None:
        copy_all(self._copies[slot], self._like)
        has_base = bool(self._header[1 - slot, _SEQUENCE])
        buffers = zip(self._slots[slot], self._slots[1 - slot], self._deltas[slot], strict=True)
        self._header[slot, _DELTAS:] = torch.tensor(
            [encode_delta(new, old, out) if has_base else 0 for new, old, out in buffers]
        )

    def _delta_sizes(self, slot: int) -> list[int]:
        """Return the bytes of each blob's delta, 0 if it has none."""
        return self._header[slot, _DELTAS:].tolist()


class Read(NamedTuple):
    """Read of a blob, or if ``delta`` of the first ``delta`` bytes of its delta, into ``into``."""

    source: int
    blob: int
    slot: int
    delta: int
    into: torch.Tensor
    sequence: int
    """Sequence number of the push."""


class PackedSubscriber:
    """A generator rank's side: see PackedPublisher for the protocol.

    Its own memory is as large as its parameters, and half of that again with ``delta``.
    """

    def __init__(
        self,
        addresses: Sequence[Any],
        shards: Sequence[Shard],
        transfer: Transfer,
        *,
        rank: int,
        generator: int = 0,
    ):
        """Prepare to read from all publishers at ``addresses``. Each pull overwrites in place the
        ``shards`` of rank ``rank`` of generator number ``generator``.
        """
        if layout_of(shards) != transfer.wanted[rank]:
            raise ValueError(
                f"the shards of generator rank {rank} differ from the layout that was planned with"
            )
        check_dtype(shards, transfer.dtype)
        self._addresses = addresses
        self._shards = shards
        self._transfer = transfer
        self._rank = rank
        self._reader = generator * len(transfer.wanted) + rank
        self._blobs = plan_blobs(transfer.sources, transfer.wanted)
        self._timeout_s = transfer.timeout_s
        self._fetching = asyncio.Lock()
        self._pulling = threading.Lock()
        self._make_staging()

    def _make_staging(self) -> None:
        device = self._shards[0].tensor.device
        self._held: list[int] = [0] * len(self._blobs)
        self._fetched: int | None = None
        self._staged: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for source, blobs in enumerate(self._blobs):
            for index, blob in enumerate(blobs):
                if self._rank not in blob.readers:
                    continue
                whole = _host_memory(blob.numel, self._transfer.dtype, device)
                size = _delta_bytes(whole, self._transfer)
                self._staged[source, index] = whole, _host_memory(size, torch.uint8, device)
                self._copies += [
                    (self._shards[place].part(piece.box), view)
                    for piece, view in zip(blob.pieces, blob.views(whole), strict=True)
                    for reader, place in piece.places
                    if reader == self._rank
                ]

    async def fetch(self, version: int) -> None:
        """Copy ``version``, published by all trainer ranks, into this rank's own memory. The
        parameters do not change.

        Drops the version fetched before. Raises VersionGone unless all trainer ranks hold
        it whole, TransferFailed if it does not arrive within ``transfer.timeout_s`` seconds.
        """
        async with self._fetching:
            await asyncio.to_thread(self._drop)
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._fetch(version)
            except TimeoutError:
                mib = sum(whole.nbytes for whole, _ in self._staged.values()) / 2**20
                raise TransferFailed(
                    f"fetch of version {version}: {mib:,.1f} MiB did not arrive within "
                    f"{self._timeout_s:.0f} s; check the network, or lower weights.min_gb_s"
                ) from None

    async def _fetch(self, version: int) -> None:
        rows = [_row(header, version, rank) for rank, header in enumerate(await self._headers())]
        reads = []
        for (source, blob), (whole, code) in self._staged.items():
            row = rows[source]
            behind = row[_SEQUENCE] - self._held[source]
            if behind:  # 2 for each push
                size = row[_DELTAS + blob] if behind == 2 else 0
                into = code if size else whole
                reads.append(Read(source, blob, _slot(row), size, into, row[_SEQUENCE]))
        try:
            await self._read(reads)
            for rank, (header, row) in enumerate(zip(await self._headers(), rows, strict=True)):
                if header[_slot(row)].tolist() != row:
                    raise VersionGone(
                        f"fetch of version {version}: trainer rank {rank} overwrote it meanwhile"
                    )
            await asyncio.to_thread(self._apply, reads)
        except BaseException:
            self._make_staging()  # an interrupted transfer may still write to the old memory
            raise
        self._held = [row[_SEQUENCE] for row in rows]
        self._fetched = version

    def pull(self, version: int) -> int:
        """Overwrite this rank's parameters; return the version.

        Raises RunError unless ``version`` was fetched last.
        """
        with self._pulling:
            if self._fetched != version:
                wrong = f"pull of version {version}: fetched is {self._fetched}"
                raise RunError(f"{wrong}; call fetch({version}) first")
            copy_all(self._copies, self._shards[0].tensor)
        return version

    def close(self) -> None:
        """Release all memory."""
        self._fetched = None
        self._staged = {}
        self._copies = []

    async def _headers(self) -> list[torch.Tensor]:
        """Return each trainer rank's current header, int64 [SLOTS, columns]."""
        raise NotImplementedError

    async def _read(self, reads: list[Read]) -> None:
        """Perform all ``reads``."""
        raise NotImplementedError

    def _drop(self) -> None:
        with self._pulling:  # not while a pull copies
            self._fetched = None

    def _apply(self, reads: list[Read]) -> None:
        for read in reads:
            if read.delta:
                whole, code = self._staged[read.source, read.blob]
                apply_delta(code[: read.delta], whole)


def _delta_bytes(whole: torch.Tensor, transfer: Transfer) -> int:
    """Return the largest size of the delta of a blob; 0 if deltas are not sent."""
    return whole.nbytes // 2 if transfer.delta else 0


def is_whole(row: list[int]) -> bool:
    """Whether a header row names a push that is in its slot, and not being written."""
    return bool(row[_SEQUENCE]) and row[_SEQUENCE] % 2 == 0


def _slot(row: list[int]) -> int:
    return (row[_SEQUENCE] // 2 - 1) % SLOTS


def _row(header: torch.Tensor, version: int, rank: int) -> list[int]:
    """Return the header row of the newest push of ``version``; raise VersionGone if none exists."""
    whole = [row for row in header.tolist() if is_whole(row)]
    rows = [row for row in whole if row[_VERSION] == version]
    if not rows:
        versions = " and ".join(str(row[_VERSION]) for row in sorted(whole)) or "nothing"
        raise VersionGone(f"fetch of version {version}: trainer rank {rank} holds {versions}")
    return max(rows)


def _host_memory(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate host memory, [numel], that ``device`` copies from and to, and touch every page."""
    return torch.empty(numel, dtype=dtype, pin_memory=device.type == "cuda").zero_()


def _device_memory(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(numel, dtype=dtype, device=device)


def encode_delta(new: torch.Tensor, old: torch.Tensor, out: torch.Tensor) -> int:
    """Write the code that turns ``old`` into ``new``, both [N] of one dtype, into ``out``, uint8
    [capacity].

    The code is a table of int32, the number of changed elements of each block, followed for each
    block by their indices in the block, uint16, and their new bits. Returns the number of bytes
    written; 0 if the capacity is too small. Bits are compared: NaN equals itself, and -0.0 differs
    from 0.0.
    """
    new, old = map(bits_of, (new, old))
    counts = torch.zeros(-(-len(new) // BLOCK), dtype=torch.int32)
    end = counts.nbytes
    if end > len(out):
        return 0
    for block, (after, before) in enumerate(zip(new.split(BLOCK), old.split(BLOCK), strict=True)):
        places = (after != before).nonzero().squeeze(1)
        counts[block] = len(places)
        for field in (places.to(torch.uint16), after[places]):
            field = field.view(torch.uint8)
            if end + len(field) > len(out):
                return 0
            out[end : end + len(field)] = field
            end += len(field)
    out[: counts.nbytes] = counts.view(torch.uint8)
    return end


def apply_delta(code: torch.Tensor, base: torch.Tensor) -> None:
    """Turn ``base`` [N], which is the ``old`` of ``encode_delta``, into its ``new``, in place.

    ``code`` is uint8 [bytes].
    """
    bits = bits_of(base)
    blocks = bits.split(BLOCK)
    end = 4 * len(blocks)
    for block, count in zip(
        blocks, _field(code, 0, len(blocks), torch.int32).tolist(), strict=True
    ):
        places = _field(code, end, count, torch.uint16)
        end += places.nbytes
        values = _field(code, end, count, bits.dtype)
        end += values.nbytes
        block[places.to(torch.int64)] = values


def _field(code: torch.Tensor, start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return code[start : start + count * dtype.itemsize].clone().view(dtype)  # a clone is aligned
