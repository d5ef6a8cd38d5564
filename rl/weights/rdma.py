"""Push between hosts: Monarch's one-sided reads of the trainer's memory, over TCP without RDMA."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from monarch.rdma import RDMAAction, RDMABuffer

from rl.model.shards import Shard
from rl.weights.packed import PackedPublisher, PackedSubscriber, Read
from rl.weights.transport import SLOTS, Transfer, TransferFailed

FIRST_CHUNK = 1 << 16  # bytes


@dataclass(frozen=True, slots=True)
class RdmaAddress:
    """Buffers through which other processes reach a trainer rank's memory."""

    header: RDMABuffer
    slots: list[list[RDMABuffer]]
    """Buffers by slot and blob."""
    deltas: list[list[list[RDMABuffer]]]
    """Buffers by slot, blob and chunk: only whole buffers can be read."""


class RdmaPublisher(PackedPublisher):
    """Publisher of memory that readers read without help from this rank: see PackedPublisher.

    Create it in an endpoint of a Monarch actor, as RDMA buffers require.
    """

    def __init__(self, shards: Sequence[Shard], transfer: Transfer, *, rank: int):
        """Allocate the slots and buffers for the ``shards`` of trainer rank ``rank``."""
        super().__init__(shards, transfer, rank=rank)
        self.address = RdmaAddress(
            _buffer(self._header.view(-1)),
            [[_buffer(blob) for blob in slot] for slot in self._slots],
            [
                [[_buffer(chunk) for chunk in chunks_of(code)] for code in slot]
                for slot in self._deltas
            ],
        )

    def close(self) -> None:
        super().close()
        slots = (buffer for slot in self.address.slots for buffer in slot)
        chunks = (buffer for slot in self.address.deltas for blob in slot for buffer in blob)
        for buffer in (self.address.header, *slots, *chunks):
            buffer.drop()


class RdmaSubscriber(PackedSubscriber):
    """Subscriber that reads from all trainer ranks in one batch: see PackedPublisher."""

    _addresses: Sequence[RdmaAddress]

    async def _headers(self) -> list[torch.Tensor]:
        buffers = [address.header for address in self._addresses]
        headers = [torch.zeros(buffer.size() // 8, dtype=torch.int64) for buffer in buffers]
        await self._read_all(list(zip(headers, buffers, strict=True)))
        return [header.view(SLOTS, -1) for header in headers]

    async def _read(self, reads: list[Read]) -> None:
        pairs: list[tuple[torch.Tensor, RDMABuffer]] = []
        for read in reads:
            address = self._addresses[read.source]
            if read.delta:
                chunks = chunks_of(read.into, read.delta)
                pairs += zip(chunks, address.deltas[read.slot][read.blob], strict=False)
            else:
                pairs.append((read.into, address.slots[read.slot][read.blob]))
        await self._read_all(pairs)

    async def _read_all(self, pairs: list[tuple[torch.Tensor, RDMABuffer]]) -> None:
        if not pairs:
            return
        action = RDMAAction()
        for into, buffer in pairs:
            action.read_remote(into.view(torch.uint8), buffer)
        try:
            # longer than the timeout of fetch
            await action.submit(timeout=math.ceil(self._timeout_s) + 1)
        except Exception as error:  # Monarch raises no other type
            raise TransferFailed(f"the trainer's memory cannot be reached: {error}") from None


def chunks_of(area: torch.Tensor, used: int | None = None) -> list[torch.Tensor]:
    """Cut ``area``, uint8 [bytes], into chunks; return all, or those of its first ``used`` bytes.

    Each chunk is a quarter of all chunks before it, so at most the larger of 1.25 times ``used``
    and FIRST_CHUNK bytes are read.
    """
    chunks = []
    start = 0
    while start < (len(area) if used is None else used):
        chunks.append(area[start : start + max(FIRST_CHUNK, start // 4)])
        start += len(chunks[-1])
    return chunks


def _buffer(memory: torch.Tensor) -> RDMABuffer:
    return RDMABuffer(memory.view(torch.uint8))
