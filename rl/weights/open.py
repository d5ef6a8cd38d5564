"""Choice of the transport, and creation of both ends of a push."""

import importlib
from collections.abc import Collection, Sequence
from typing import Any

from rl.model.shards import Shard
from rl.weights.config import TransportName
from rl.weights.shared_memory import SharedMemoryPublisher, SharedMemorySubscriber
from rl.weights.transport import Publisher, Subscriber, Transfer

NETWORKS = {
    "rdma": ("rl.weights.rdma", "Rdma"),
    "tcp": ("rl.weights.tcp", "Tcp"),
    "torchstore": ("rl.weights.store", "Store"),
}
"""Module and prefix of the classes' names."""


def choose_transport(requested: str, domains: Collection[str], *, has_rdma: bool) -> TransportName:
    """Return the requested transport; for ``auto`` the fastest one between these memory domains.

    ``has_rdma``: whether the hosts have RDMA devices.
    """
    if requested != "auto":
        return requested  # type: ignore[return-value]
    if len(set(domains)) == 1:
        return "shared_memory"
    return "rdma" if has_rdma else "tcp"


def open_publisher(transfer: Transfer, shards: Sequence[Shard], *, rank: int) -> Publisher:
    """Return the end of trainer rank ``rank``. Call this within the rank's actor."""
    if transfer.transport in NETWORKS:
        return _network_end(transfer, "Publisher")(shards, transfer, rank=rank)
    on_device = transfer.transport == "cuda_ipc"
    return SharedMemoryPublisher(
        shards, transfer.dtype, on_device=on_device, patience=transfer.patience
    )


def open_subscriber(
    transfer: Transfer,
    addresses: Sequence[Any],
    shards: Sequence[Shard],
    *,
    generator: int,
    rank: int,
) -> Subscriber:
    """Return the end of rank ``rank`` of generator number ``generator``."""
    if transfer.transport in NETWORKS:
        subscriber = _network_end(transfer, "Subscriber")
        return subscriber(addresses, shards, transfer, rank=rank, generator=generator)
    reader = generator * len(transfer.wanted) + rank
    return SharedMemorySubscriber(addresses, shards, reader=reader, patience=transfer.patience)


def _network_end(transfer: Transfer, end: str) -> Any:
    """Return the class of a network transport. Its module, which takes seconds to import, is
    imported only here.
    """
    module, prefix = NETWORKS[transfer.transport]
    return getattr(importlib.import_module(module), prefix + end)
