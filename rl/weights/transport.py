"""Interface of all transports of the push."""

import itertools
import pickle
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Protocol

import torch

from rl.errors import RunError
from rl.model.shards import Layout, Shard
from rl.weights.config import TransportName
from rl.weights.routes import plan_push

ALIGN = 64
"""Alignment of regions in a buffer, in elements, for whole cache lines and vector loads."""


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
    """Number of hosts that a rank sends to (``tcp``)."""
    patience: float = 60.0
    """Seconds that either side waits for the other."""

    @property
    def nbytes(self) -> int:
        """Bytes that all generators read for a version."""
        elements = plan_push(self.sources, self.wanted).elements()
        return self.generators * self.dtype.itemsize * sum(each.total() for each in elements)

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
        values = [getattr(self, each.name) for each in fields(self)]
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


class Publisher(Protocol):
    """A trainer rank's side: holds two versions of its shards, cast to the generator's dtype."""

    address: Any
    """Address for subscribers; can be sent to another process."""

    async def publish(self, version: int) -> Sent:
        """Make the current weights readable as ``version``. They must not change before this
        returns.

        Raises RunError if a slot cannot be had in time.
        """

    def excuse(self, generator: int) -> None:
        """Stop waiting for a generator that has gone, until a reader of its number has fetched."""

    def close(self) -> None:
        """Release all resources; subscribers fail from here on."""


class Subscriber(Protocol):
    """A generator rank's side."""

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


def starts_of(numels: list[int]) -> tuple[list[int], int]:
    """Return the aligned start of each of consecutive regions of ``numels`` elements, and the
    number of elements up to the end of the last region.
    """
    ends = list(itertools.accumulate((-(-numel // ALIGN) * ALIGN for numel in numels), initial=0))
    return ends[:-1], ends[-1]
