"""Transports of the push: their interface, choice and creation, and the config of the push."""

import importlib
import pickle
import zlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import Annotated, Any, Literal, Protocol

import torch

from rl.errors import RunError, one_of
from rl.model.shards import Layout, Shard
from rl.model.updates import EMPTY, Update
from rl.types.rules import COSMETIC, PERFORMANCE, NeedsCuda, above, at_least
from rl.weights.routes import plan_push

TransportName = Literal["shared_memory", "cuda_ipc", "collective", "rdma", "tcp", "torchstore"]

NETWORKS = {
    "tcp": "rl.weights.tcp:Tcp",
    "collective": "rl.weights.collective:Collective",
    "rdma": "rl.weights.rdma:Rdma",
    "torchstore": "rl.weights.store:Store",
}
"""Module and prefix of the classes of each transport between hosts. Its publishers reserve a place
for each reader, and can send only what changed."""

BETWEEN_HOSTS = one_of(["auto", *NETWORKS])
"""Values of ``weights.transport`` for several nodes, in words."""

RELAYS = ("collective", "tcp")
"""Transports whose readers serve each other."""

ON_DEVICE = ("cuda_ipc", "collective")
"""Transports whose slots are in the memory of the trainer's GPUs."""

SLOTS = 2
"""Number of versions that a trainer rank holds."""


@dataclass(kw_only=True, slots=True)
class WeightPushConfig:
    """Push of the weights from the trainer to the generators after each step."""

    transport: Annotated[
        Literal["auto", TransportName],
        PERFORMANCE,
        NeedsCuda(("cuda_ipc",), one_of(["auto", "shared_memory", *NETWORKS])),
    ] = "auto"
    """Transport of the weights. ``auto`` uses shared memory if trainer and generators are on one
    host; otherwise ``collective`` between GPUs, and on CPU RDMA if each of the hosts has an
    RDMA device, else TCP. ``collective`` sends through NCCL, or gloo on CPU; ``cuda_ipc`` copies
    from GPU to GPU of one host; ``torchstore`` goes through a store."""

    fan_out: Annotated[int, PERFORMANCE, at_least(1, 1024)] = 1
    """Number of hosts that the trainer's host, and each host of generators, sends the weights to
    (``collective``, ``tcp``). 1 is a chain: the trainer sends the weights once, however many
    generators there are. Raise it if a slow host delays the hosts after it. With as many as there
    are hosts of generators, each host reads from the trainer."""

    delta: Annotated[bool, PERFORMANCE] = False
    """Whether to send only the elements that changed if that is less (``collective``, ``tcp``,
    ``rdma`` and ``torchstore``). The weights are the same bit for bit."""

    digests: Annotated[bool, COSMETIC] = True
    """Whether to compare a digest of every parameter on every rank of trainer and generators after
    each push. In bfloat16 this is the only check that finds weights of an older version, which pass
    the canary. Both sides together take about 1.5 CPU seconds per GB pushed
    (``scripts/bench/weight_push.py``)."""

    min_gb_s: Annotated[float, above(0, 1e6), COSMETIC] = 0.1
    """Bandwidth of the slowest network that a push works with, in GB/s for the bytes of all
    generators together. A push fails if it takes longer than ``deadlines.push`` plus the time of
    its bytes at this rate; lower it for a slower network."""

    canary_tolerance: Annotated[float | None, at_least(0, 1e6), COSMETIC] = None
    """Maximum difference between the log-probs of trainer and generators on a fixed prompt after
    each push. None for 1e-3 if the generators compute in float32 and 0.5 in bfloat16; 0 disables
    the check."""

    def canary_limit(self, dtype: str) -> float:
        """Return ``canary_tolerance`` for generators that compute in ``dtype``."""
        default = 1e-3 if dtype == "float32" else 0.5
        return default if self.canary_tolerance is None else self.canary_tolerance


class VersionGone(RunError):
    """A trainer rank does not hold the requested version, or no longer."""


class TransferFailed(RunError):
    """A version did not arrive, or did not arrive in time."""


@dataclass(frozen=True)
class Transfer:
    """Facts about the push that every rank at either end needs.

    A controller sends a transfer to all of them. The layouts are therefore packed once.
    """

    transport: TransportName
    dtype: torch.dtype
    sources: tuple[Layout, ...]
    """Layouts of the trainer's ranks."""
    wanted: tuple[Layout, ...]
    """Layouts of the ranks of one generator; all generators are alike."""
    generators: int = 1
    delta: bool = False
    fan_out: int = 1
    """Number of hosts that a rank sends to, if its readers serve each other."""
    timeout_s: float = 60.0
    """Seconds that either side waits for the other."""

    @property
    def is_network(self) -> bool:
        """Whether the transport works between hosts."""
        return self.transport in NETWORKS

    @property
    def nbytes(self) -> int:
        """Bytes that all generators read for a version."""
        elements = plan_push(self.sources, self.wanted).elements()
        return self.generators * self.dtype.itemsize * sum(counts.total() for counts in elements)

    def describe(self) -> str:
        """Return a readable table of the transfers.

        Raises ValueError, naming the parameter, if a parameter cannot be routed.
        """
        plan = plan_push(self.sources, self.wanted)
        return f"transport: {self.transport}\n{plan.describe(self.dtype)}\n"

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, (self._packed,)

    @cached_property
    def _packed(self) -> bytes:
        values = [getattr(self, field.name) for field in fields(self)]
        return zlib.compress(pickle.dumps(values), level=1)


def _unpacked(packed: bytes) -> Transfer:
    return Transfer(*pickle.loads(zlib.decompress(packed)))


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes that all ranks of a generator together read from one trainer rank for a version."""

    bytes_full: int
    """Bytes if the generator holds no version yet."""
    bytes_sent: int
    """Bytes if it holds the previous version: fewer if only changes are sent."""
    update: Update = EMPTY
    """Update of the policy since the push before, of a sample of the rank's weights."""


class Publisher(Protocol):
    """A trainer rank's side: holds two versions of its shards, cast to the generator's dtype. Made
    as ``Publisher(shards, transfer, rank=rank)``.
    """

    address: Any
    """Address for subscribers; can be sent to another process."""

    async def publish(self, version: int) -> Sent:
        """Make the current weights readable as ``version``. They must not change before this
        returns.

        Raises RunError if a slot cannot be had in time.
        """

    def close(self) -> None:
        """Release all resources; subscribers fail from here on."""


class Subscriber(Protocol):
    """A generator rank's side, which overwrites its parameters in place. Made as
    ``Subscriber(addresses, shards, transfer, rank=rank, generator=generator)``.
    """

    async def fetch(self, version: int) -> None:
        """Prepare the pull of ``version``, published by all trainer ranks, while generation goes on
        with the current weights.

        Raises VersionGone or TransferFailed. Another ``fetch`` can follow.
        """

    def pull(self, version: int) -> int:
        """Overwrite this rank's parameters, while generation is paused; return their version.

        Raises RunError if ``version`` is not available whole.
        """

    def close(self) -> None:
        """Release all resources."""


def check_dtype(shards: Sequence[Shard], dtype: torch.dtype) -> None:
    """Raise RunError, naming the parameter, unless ``shards`` have the pushed dtype."""
    for shard in shards:
        if shard.tensor.dtype != dtype:
            raise RunError(
                f"{shard.name} is {shard.tensor.dtype} in the generator and pushed as {dtype}"
            )


@torch.no_grad()
def copy_all(pairs: Any, like: torch.Tensor) -> None:
    """Copy each (destination, source), casting, ``beside`` the work of the device of ``like``.

    From another GPU, which no test runs, a copy passes through memory of torch's own allocator:
    torch copies on the GPU of the source, and vLLM's memory pools are open to their own GPU alone.
    """
    with beside(like.device):
        for destination, source in pairs:
            if destination.is_cuda and source.is_cuda:
                source = source.to(destination.device, non_blocking=True)
            destination.copy_(source, non_blocking=True)


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Run the block on the side stream of a GPU: after the work that its default stream and this
    thread's stream have now, and beside their later work. Returns when the block's work is done.
    """
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        # vLLM computes on a stream of its own
        for other in (torch.cuda.default_stream(), torch.cuda.current_stream()):
            side_stream(device).wait_stream(other)
        with on_side_stream(device):
            yield
        side_stream(device).synchronize()


@contextmanager
def on_side_stream(device: torch.device) -> Iterator[None]:
    """Begin the work of the block on the side stream of a GPU, without waiting for any other."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device), torch.cuda.stream(side_stream(device)):
        yield


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one side stream of a GPU: torch keeps memory for the casts of each stream."""
    return torch.cuda.Stream(device)


def choose_transport(
    requested: str, domains: Collection[str], *, on_gpus: bool, has_rdma: bool
) -> TransportName:
    """Return the requested transport; for ``auto`` the fastest one between these memory domains.

    ``on_gpus``: whether the ranks have GPUs. ``has_rdma``: whether all of their hosts have RDMA
    devices.
    """
    if requested != "auto":
        return requested  # type: ignore[return-value]
    if len(set(domains)) == 1:
        return "shared_memory"
    if on_gpus:
        return "collective"
    return "rdma" if has_rdma else "tcp"


def open_publisher(transfer: Transfer, shards: Sequence[Shard], *, rank: int) -> Publisher:
    """Return the end of trainer rank ``rank``. Call this within the rank's actor."""
    return _class_of(transfer, "Publisher")(shards, transfer, rank=rank)


def open_subscriber(
    transfer: Transfer,
    addresses: Sequence[Any],
    shards: Sequence[Shard],
    *,
    generator: int,
    rank: int,
) -> Subscriber:
    """Return the end of rank ``rank`` of generator number ``generator``."""
    subscriber = _class_of(transfer, "Subscriber")
    return subscriber(addresses, shards, transfer, rank=rank, generator=generator)


def _class_of(transfer: Transfer, end: str) -> Any:
    """Import the class of an end of the transport. Some of their modules take seconds."""
    path = NETWORKS.get(transfer.transport, "rl.weights.shared_memory:SharedMemory")
    module, prefix = path.split(":")
    return getattr(importlib.import_module(module), prefix + end)
