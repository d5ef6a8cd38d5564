"""Push through a store: a torchstore volume, in a separate process, keeps the trainers' blobs."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from monarch.actor import ProcMesh

from rl.compat.torchstore_internals import torchstore
from rl.model.shards import Shard
from rl.weights.packed import PackedPublisher, PackedSubscriber, Read
from rl.weights.transport import SLOTS, Transfer

STORE = "tiller"


async def open_store(procs: ProcMesh) -> None:
    """Start a store with its volume in the one process of ``procs``, on a host with enough memory.

    The controller calls this. The store takes two slots of each trainer rank, each as large as the
    rank's shards in the transfer dtype, and the deltas.
    """
    await torchstore.initialize(1, torchstore.SingletonStrategy(), STORE, procs)


async def close_store() -> None:
    """Empty the store and free its name. The caller stops its process."""
    await torchstore.shutdown(STORE)


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """Keys of a trainer rank's values in the store: few, and the same for every version."""

    rank: int

    def key(self, *shards: object) -> str:
        return ".".join(map(str, ("trainer", self.rank, *shards)))

    async def put(self, value: torch.Tensor, *shards: object) -> None:
        await torchstore.put(self.key(*shards), value, STORE)

    async def get(self, *shards: object) -> torch.Tensor:
        return await torchstore.get(self.key(*shards), store_name=STORE)


class StorePublisher(PackedPublisher):
    """Publisher that puts its slots into the store: see PackedPublisher.

    The values stay in the store when it is closed.
    """

    def __init__(self, shards: Sequence[Shard], transfer: Transfer, *, rank: int):
        """Allocate the slots for the ``shards`` of trainer rank ``rank``."""
        super().__init__(shards, transfer, rank=rank)
        torchstore.reset_client(STORE)
        self.address = StoreAddress(rank)

    async def _put_header(self, slot: int) -> None:
        await self.address.put(self._header, "header")

    async def _put_slot(self, slot: int) -> None:
        for b, (whole, code, size) in enumerate(
            zip(self._slots[slot], self._deltas[slot], self._delta_sizes(slot), strict=True)
        ):
            await self.address.put(whole, "blob", slot, b)
            if size:
                # of a view, the store would copy all the memory
                await self.address.put(code[:size].clone(), "delta", slot, b)


class StoreSubscriber(PackedSubscriber):
    """Subscriber that reads from the store: see PackedPublisher."""

    _addresses: Sequence[StoreAddress]

    def __init__(self, *args: Any, **options: Any):
        """Accept the arguments of PackedSubscriber."""
        super().__init__(*args, **options)
        torchstore.reset_client(STORE)

    async def _headers(self) -> list[torch.Tensor]:
        return await asyncio.gather(*map(_header, self._addresses))

    async def _read(self, reads: list[Read]) -> None:
        await asyncio.gather(*map(self._read_one, reads))

    async def _read_one(self, read: Read) -> None:
        kind = "delta" if read.delta else "blob"
        value = await self._addresses[read.source].get(kind, read.slot, read.blob)
        # a delta that was overwritten meanwhile may be shorter
        size = min(len(value), read.delta or len(value))
        read.into[:size] = value[:size]


async def _header(address: StoreAddress) -> torch.Tensor:
    if not await torchstore.exists(address.key("header"), STORE):
        return torch.zeros(SLOTS, 1, dtype=torch.int64)
    return await address.get("header")
