"""The push between processes of one host, through memory that both map."""

import mmap
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rl.errors import RunError
from rl.model.parts import Box, Layout, Part, layout_of
from rl.weights.routes import Route, plan_routes
from rl.weights.transport import starts_of

HEADER_BYTES = 4096
SLOTS = 2
_SEQUENCE, _ACKNOWLEDGED = 0, 8  # header fields, int64: one sequence a slot, one version + 1 a reader
MAX_READERS = HEADER_BYTES // 8 - _ACKNOWLEDGED


@dataclass(frozen=True, slots=True)
class Segment:
    """Where a trainer rank's memory is found, and what lies in it."""

    host: str
    pid: int
    fd: int
    dtype: torch.dtype
    slot_bytes: int
    layout: Layout


class Publisher:
    """A trainer rank's side of the push.

    Two slots hold the shards of two versions, version v in slot v % 2, cast to the generator's
    dtype. A slot's sequence number is odd while it is written and 2v + 2 when it holds version v.
    A reader checks it before and after its copy, so it sees all of v or fails; after the copy it
    acknowledges v. The publisher overwrites a slot only when every reader has acknowledged the
    version in it or a newer one. ::

        publisher = Publisher(parameters, dtype)      # trainer rank
        subscriber = Subscriber(segments, ...)        # generator rank, segments of all trainer ranks
        publisher.publish(v)                          # returns when v is readable
        subscriber.pull(v)                            # returns when the generator's parameters are v

    The memory has no name (memfd): the kernel frees it with the last process that maps it, so no
    crash of anyone leaves it behind, and the size of /dev/shm does not limit it.
    """

    def __init__(self, parameters: Sequence[Part], dtype: torch.dtype, *, readers: int):
        """Takes two slots of memory, each the size of the rank's shards in ``dtype``."""
        if readers > MAX_READERS:
            raise ValueError(f"readers is {readers}; the header has room for {MAX_READERS}")
        self._tensors = [part.tensor for part in parameters]
        _, count = starts_of([part.box.numel for part in parameters])
        slot_bytes = -(-count * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = os.memfd_create("tiller-weights")
        os.ftruncate(fd, HEADER_BYTES + SLOTS * slot_bytes)
        self.segment = Segment(socket.gethostname(), os.getpid(), fd, dtype, slot_bytes, layout_of(parameters))
        self._header, slots = _map(fd, self.segment)
        for slot in slots:
            slot.zero_()  # first use of a page is ten times slower than the next: pay it here
        self._views = [_views(slot, self.segment.layout) for slot in slots]
        self._readers = readers

    def publish(self, version: int, *, timeout: float = 60.0) -> None:
        """Make the current weights readable as ``version``. Raises RunError after ``timeout`` seconds."""
        slot = version % SLOTS
        self._await_readers(version, timeout)
        self._header[_SEQUENCE + slot] = 2 * version + 1
        for view, tensor in zip(self._views[slot], self._tensors, strict=True):
            view.copy_(tensor)
        if self._tensors[0].is_cuda:
            torch.cuda.synchronize()
        self._header[_SEQUENCE + slot] = 2 * version + 2

    def _await_readers(self, version: int, timeout: float) -> None:
        held = (int(self._header[_SEQUENCE + version % SLOTS]) - 2) // 2
        deadline = time.monotonic() + timeout
        while self._header[_SEQUENCE + version % SLOTS]:
            behind = [r for r in range(self._readers) if self._header[_ACKNOWLEDGED + r] <= held]
            if not behind:
                return
            if time.monotonic() > deadline:
                raise RunError(
                    f"publish of version {version}: generator ranks {behind} did not pull {held} within {timeout:.0f} s"
                )
            time.sleep(0.001)


class Subscriber:
    """A generator rank's side of the push: see Publisher for the protocol."""

    def __init__(
        self,
        segments: Sequence[Segment],
        parameters: Sequence[Part],
        *,
        reader: int,
    ):
        """``segments`` of all trainer ranks; ``parameters`` are overwritten in place by each pull."""
        here = socket.gethostname()
        if elsewhere := sorted({s.host for s in segments} - {here}):
            raise RunError(f"the trainer runs on {elsewhere}, the generator on {here}: shared memory needs one host")
        routes = plan_routes([segment.layout for segment in segments], layout_of(parameters), reader=reader)
        for part in parameters:
            if part.tensor.dtype != segments[0].dtype:
                raise RunError(f"{part.name} is {part.tensor.dtype} in the generator and pushed as {segments[0].dtype}")
        mapped = [_map_of(segment) for segment in segments]
        self._headers = [header for header, _ in mapped]
        views = [
            [_views(slot, s.layout) for s, (_, slots) in zip(segments, mapped, strict=True) for slot in [slots[i]]]
            for i in range(SLOTS)
        ]
        self._reader = reader
        self._copies = [
            [
                _endpoints(
                    route,
                    views[slot][route.source][route.held],
                    segments[route.source].layout[route.held].box,
                    parameters[route.wanted],
                )
                for route in routes
            ]
            for slot in range(SLOTS)
        ]

    @torch.no_grad()
    def pull(self, version: int) -> None:
        """Overwrite this rank's parameters with ``version``. Raises RunError if it is not there whole."""
        slot = version % SLOTS
        self._check(version, "before")
        for destination, source in self._copies[slot]:
            destination.copy_(source)
        self._check(version, "during")
        for header in self._headers:
            header[_ACKNOWLEDGED + self._reader] = version + 1

    def _check(self, version: int, when: str) -> None:
        for rank, header in enumerate(self._headers):
            sequence = int(header[_SEQUENCE + version % SLOTS])
            if sequence != 2 * version + 2:
                held = f"version {sequence // 2 - 1}" if sequence else "nothing"
                holds = "is being written" if sequence % 2 else f"holds {held}"
                raise RunError(f"pull of version {version}: {when} the copy, the slot of trainer rank {rank} {holds}")


def _map(fd: int, segment: Segment) -> tuple[torch.Tensor, list[torch.Tensor]]:
    memory = mmap.mmap(fd, HEADER_BYTES + SLOTS * segment.slot_bytes)
    header = torch.frombuffer(memory, dtype=torch.int64, count=HEADER_BYTES // 8)
    count = segment.slot_bytes // segment.dtype.itemsize
    slots = [
        torch.frombuffer(memory, dtype=segment.dtype, count=count, offset=HEADER_BYTES + i * segment.slot_bytes)
        for i in range(SLOTS)
    ]
    return header, slots


def _map_of(segment: Segment) -> tuple[torch.Tensor, list[torch.Tensor]]:
    fd = os.open(f"/proc/{segment.pid}/fd/{segment.fd}", os.O_RDWR)
    header, slots = _map(fd, segment)
    os.close(fd)
    for slot in slots:
        slot.view(torch.uint8)[:: mmap.PAGESIZE].sum()  # map the pages now, not during the first pull
    return header, slots


def _views(slot: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    starts, _ = starts_of([region.box.numel for region in layout])
    return [
        slot[start : start + region.box.numel].view(region.box.shape)
        for start, region in zip(starts, layout, strict=True)
    ]


def _endpoints(route: Route, held: torch.Tensor, held_box: Box, wanted: Part) -> tuple[torch.Tensor, torch.Tensor]:
    return wanted.tensor[route.box.slices_in(wanted.box)], held[route.box.slices_in(held_box)]
