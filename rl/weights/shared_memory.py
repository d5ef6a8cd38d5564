"""Push between processes of one host, through memory that both map."""

import asyncio
import fcntl
import mmap
import os
import secrets
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from rl.errors import RunError
from rl.host.platform import memory_domain
from rl.model.shards import Layout, Shard, layout_of
from rl.weights.cuda_memory import DeviceMemory, pin, unpin
from rl.weights.routes import packed_numel, packed_views, plan_routes
from rl.weights.transport import SLOTS, Sent, Transfer, check_dtype, copy_all

HEADER_BYTES = mmap.PAGESIZE
# header fields, int64; the version is stored as version + 1, with 0 for no version
_VERSION = 0
_TOKEN = 1
_NONE = -1


@dataclass(frozen=True, slots=True)
class Segment:
    """Address of a trainer rank's slots, and the layout of each."""

    domain: str
    pid: int
    fds: tuple[int, ...]
    token: int
    dtype: torch.dtype
    layout: Layout
    device: tuple[DeviceMemory, ...] = ()
    """GPU memory of each slot, if the weights stay on the GPU."""


def slot_bytes(layout: Layout, dtype: torch.dtype) -> int:
    """Return the size of a slot without its header, in whole pages."""
    size = packed_numel([region.box for region in layout]) * dtype.itemsize
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


class SharedMemoryPublisher:
    """A trainer rank's side of the push.

    Two slots hold the rank's shards of two versions, cast to the generator's dtype. Each slot is
    separate memory with a header that names its version, or none while the slot is written. A
    process holds a lock on a slot while it uses the slot: the writer an exclusive lock, readers a
    shared one. Unlocking after a copy is the reader's acknowledgement. ::

        publisher = SharedMemoryPublisher(shards, transfer, rank=0)    # trainer rank
        subscriber = SharedMemorySubscriber(segments, shards, transfer, rank=0)    # generator rank
        await publisher.publish(v)    # v is readable
        held = subscriber.pull(v)     # the parameters are those of held

    - publish(v) takes the slots alternately: lock, unset the header, cast and copy, set the header
      to v, unlock.
    - pull(v) locks a slot that holds v on every trainer rank, copies its slices, unlocks. If v has
      been replaced by newer versions, it takes the newest version that all ranks hold. The ranks of
      one generator compare their versions, and ranks behind the newest pull again.

    So a reader sees all of one version or an error (a header that is unset under a reader's lock
    means that the writer died), and no slot is reused under a reader. A publish waits only for
    readers in the middle of a copy of the older version. Locks belong to open files: the kernel
    drops them with the process, however it ends, so a dead process blocks no other.

    The memory has no name (memfd): the kernel frees it with the last process that maps it, so no
    crash leaves it behind, and the size of /dev/shm does not limit it.

    On CUDA (not run by any test) host slots are pinned, so that copies run at the speed of the bus
    on a separate stream. With ``cuda_ipc`` the slots are GPU memory that generator ranks of the
    same host open, and weights are copied from device to device.
    """

    def __init__(self, shards: Sequence[Shard], transfer: Transfer, *, rank: int):
        """Allocate two slots, each the size of the rank's shards in the transfer dtype."""
        self._timeout_s = transfer.timeout_s
        self._tensors = [shard.tensor for shard in shards]
        device = self._tensors[0].device
        layout = layout_of(shards)
        size = slot_bytes(layout, transfer.dtype)
        on_device = transfer.transport == "cuda_ipc"
        fds = tuple(os.memfd_create("tiller-weights") for _ in range(SLOTS))
        memory = tuple(DeviceMemory.allocate(size, device) for _ in fds if on_device)
        for fd in fds:
            os.truncate(fd, HEADER_BYTES + (0 if on_device else size))
        token = secrets.randbits(62)
        self.address = segment = Segment(
            memory_domain(), os.getpid(), fds, token, transfer.dtype, layout, memory
        )
        self._slots = [_Slot(fd, segment, index, device) for index, fd in enumerate(fds)]
        self._turn = 0
        for slot in self._slots:
            # the first use of a page is ten times slower than the next
            slot.memory.zero_()
            slot.header[_TOKEN] = segment.token

    async def publish(self, version: int) -> Sent:
        """Run ``write`` in a thread. Raises RunError if a reader holds the slot longer than
        ``timeout_s``.
        """
        await asyncio.to_thread(self.write, version)
        size = sum(view.nbytes for view in self._slots[0].views)
        return Sent(bytes_full=size, bytes_sent=size)

    def write(self, version: int) -> None:
        """Make the current weights readable as ``version``. They must not change before this
        returns.
        """
        with self._claimed(version) as slot:
            copy_all(zip(slot.views, self._tensors, strict=True), self._tensors[0])
            slot.version = version

    @contextmanager
    def _claimed(self, version: int):
        """Yield the slot to overwrite, locked and with its header unset."""
        slot = self._slots[self._turn]
        if not slot.wait_for_lock(fcntl.LOCK_EX, self._timeout_s):
            raise RunError(
                f"publish of version {version}: a generator rank has been copying version "
                f"{slot.version} for {self._timeout_s:.0f} s; check whether it hangs"
            )
        slot.version = _NONE
        try:
            yield slot
            self._turn = (self._turn + 1) % SLOTS
        finally:
            slot.unlock()

    def close(self) -> None:
        """Unmap the slots; the kernel frees them when the last reader closes too."""
        for slot in self._slots:
            slot.close()
        for memory in self.address.device:
            memory.free()


class SharedMemorySubscriber:
    """A generator rank's side of the push: see SharedMemoryPublisher."""

    def __init__(
        self,
        segments: Sequence[Segment],
        shards: Sequence[Shard],
        transfer: Transfer,
        *,
        rank: int,
        generator: int = 0,
    ):
        """Map the ``segments`` of all trainer ranks. Each pull overwrites in place the tensors of
        ``shards``.

        If several trainer ranks hold equal shards, the readers choose different ones.
        """
        if elsewhere := {segment.domain for segment in segments} - {memory_domain()}:
            raise RunError(
                f"the trainer runs in {sorted(elsewhere)}, the generator in {memory_domain()}: "
                "shared memory needs one host; set weights.transport to 'rdma' or 'auto'"
            )
        check_dtype(shards, transfer.dtype)
        layouts = [segment.layout for segment in segments]
        reader = generator * len(transfer.wanted) + rank
        routes = plan_routes(layouts, layout_of(shards), reader=reader)
        self._like = shards[0].tensor
        self._timeout_s = transfer.timeout_s
        device = self._like.device
        self._sources = [_open(rank, segment, device) for rank, segment in enumerate(segments)]
        self._copies: dict[_Slot, list[tuple[torch.Tensor, torch.Tensor]]] = {
            slot: [] for source in self._sources for slot in source
        }
        for route in routes:
            slices = route.box.slices_in(segments[route.source].layout[route.held].box)
            destination = shards[route.wanted].part(route.box)
            for slot in self._sources[route.source]:
                self._copies[slot].append((destination, slot.views[route.held][slices]))

    async def fetch(self, version: int) -> None:
        """Do nothing: a published version is in memory of this host already."""

    def pull(self, version: int) -> int:
        """Overwrite this rank's parameters with ``version``, or with the newest version if
        ``version`` is gone; return the version used.

        Raises RunError if some trainer rank holds neither ``version`` nor a newer one whole.
        """
        deadline = time.monotonic() + self._timeout_s
        target = version
        while not (claimed := self.claim(target)):
            target = min(
                max(slot.version_after_write(self._timeout_s) for slot in source)
                for source in self._sources
            )
            if target < version or time.monotonic() > deadline:
                versions = [
                    sorted({slot.version for slot in slots} - {_NONE}) for slots in self._sources
                ]
                texts = (f"trainer rank {n} holds {v or 'nothing'}" for n, v in enumerate(versions))
                raise RunError(f"pull of version {version}: {'; '.join(texts)}")
        copy_all((pair for slot in claimed for pair in self._copies[slot]), self._like)
        self.release(claimed)
        return target

    def claim(self, version: int) -> list["_Slot"]:
        """Lock and return a slot with ``version`` of every trainer rank; empty if one has none."""
        claimed: list[_Slot] = []
        for source in self._sources:
            slot = next((slot for slot in source if slot.lock_for(version)), None)
            if slot is None:
                self.release(claimed)
                return []
            claimed.append(slot)
        return claimed

    def release(self, claimed: list["_Slot"]) -> None:
        """Unlock the ``claimed`` slots."""
        for slot in claimed:
            slot.unlock()

    def close(self) -> None:
        """Unmap the trainer's memory."""
        for slot in self._copies:
            slot.close()
        self._copies = {}


class _Slot:
    """One process's view of a slot: the lock, the header, and the regions."""

    def __init__(self, fd: int, segment: Segment, index: int, device: torch.device):
        """``device`` copies from and to the slot."""
        self._fd = fd
        self._device = device
        self._mapped = mmap.mmap(fd, 0)
        self.header = torch.frombuffer(self._mapped, dtype=torch.int64, count=HEADER_BYTES // 8)
        if segment.device:
            self.memory = segment.device[index].tensor(device, own=segment.pid == os.getpid())
        else:
            self.memory = torch.frombuffer(self._mapped, dtype=torch.uint8, offset=HEADER_BYTES)
            pin(self.memory, device)
        boxes = [region.box for region in segment.layout]
        self.views = packed_views(self.memory.view(segment.dtype), boxes)

    @property
    def version(self) -> int:
        """Policy version in the slot; -1 for none."""
        return int(self.header[_VERSION]) - 1

    @version.setter
    def version(self, version: int) -> None:
        self.header[_VERSION] = version + 1

    def lock(self, kind: int) -> bool:
        """Try to take the lock, fcntl.LOCK_EX or LOCK_SH; return whether it was free."""
        try:
            fcntl.flock(self._fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def wait_for_lock(self, kind: int, timeout_s: float) -> bool:
        """Take the lock; return False if it was not free within ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        while not self.lock(kind):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.0005)
        return True

    def version_after_write(self, timeout_s: float) -> int:
        """Return the version after any write in progress, during which the header names none."""
        if not self.wait_for_lock(fcntl.LOCK_SH, timeout_s):
            return _NONE
        version = self.version
        self.unlock()
        return version

    def lock_for(self, version: int) -> bool:
        """Take a reader's lock if it is free and the slot holds ``version``; return success."""
        if self.version != version or not self.lock(fcntl.LOCK_SH):
            return False
        if self.version == version:
            return True
        self.unlock()
        return False

    def unlock(self) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Unpin and close. The kernel drops the mapping with its last tensor."""
        if not self.memory.is_cuda:
            unpin(self.memory, self._device)
        os.close(self._fd)


def _open(rank: int, segment: Segment, device: torch.device) -> list[_Slot]:
    """Map the slots of trainer rank ``rank`` into this process."""
    slots = []
    for index, fd in enumerate(segment.fds):
        path = f"/proc/{segment.pid}/fd/{fd}"
        if not os.path.exists(path):
            raise RunError(
                f"trainer rank {rank}, process {segment.pid}, has ended; start its mesh again"
            )
        slot = _Slot(os.open(path, os.O_RDWR), segment, index, device)
        if int(slot.header[_TOKEN]) != segment.token:
            raise RunError(
                f"process {segment.pid} is no longer trainer rank {rank}; start its mesh again"
            )
        slots.append(slot)
        if not segment.device:
            slot.memory[:: mmap.PAGESIZE].sum()  # map the pages now, not during the first pull
    return slots
