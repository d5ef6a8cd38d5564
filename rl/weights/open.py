"""Both ends of a push, for the transport that the topology or the config chooses."""

import importlib
from collections.abc import Collection, Sequence
from typing import Any

from rl.model.shards import Shard
from rl.weights import shared_memory
from rl.weights.config import TransportName
from rl.weights.transport import Publisher, Subscriber, Transfer


def choose_transport(wish: str, domains: Collection[str]) -> TransportName:
    """The transport wished for, or the quickest for ranks in these memory domains."""
    if wish != "auto":
        return wish  # type: ignore[return-value]
    return "shared_memory" if len(set(domains)) == 1 else "rdma"


def open_publisher(transfer: Transfer, shards: Sequence[Shard], *, rank: int) -> Publisher:
    """The trainer rank's end, opened within its actor."""
    if transfer.transport in ("shared_memory", "cuda_ipc"):
        on_device = transfer.transport == "cuda_ipc"
        return shared_memory.Publisher(
            shards, transfer.dtype, on_device=on_device, patience=transfer.patience
        )
    network = _network(transfer.transport)
    return network.Publisher(shards, transfer, rank=rank)


def open_subscriber(
    transfer: Transfer,
    addresses: Sequence[Any],
    shards: Sequence[Shard],
    *,
    generator: int,
    rank: int,
) -> Subscriber:
    """The end of rank ``rank`` of generator number ``generator``."""
    if transfer.transport in ("shared_memory", "cuda_ipc"):
        reader = generator * len(transfer.wanted) + rank
        return shared_memory.Subscriber(
            addresses, shards, reader=reader, patience=transfer.patience
        )
    network = _network(transfer.transport)
    return network.Subscriber(addresses, shards, transfer, rank=rank, generator=generator)


def _network(transport: TransportName) -> Any:
    """The transport's module; imported only where it is used, since it takes seconds."""
    return importlib.import_module(
        {"rdma": "rl.weights.rdma", "torchstore": "rl.weights.store"}[transport]
    )
