"""Model of torch's allocator of GPU memory: what it reserves for a sequence of tensors.

Rules and sizes are those of torch's ``c10/cuda/CUDACachingAllocator.cpp``. The allocator reserves
segments. A tensor takes the smallest free block of its stream that is large enough, and the rest of
the block stays free. Small tensors have segments of their own.
"""

import random
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

BLOCK = 512
"""Sizes of blocks are multiples of this."""
SMALL = 1 << 20
"""Size of the largest small tensor."""
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
OWN_SEGMENT = 10 << 20
"""Size of the smallest tensor that has a fixed segment of its own size, to ``OWN_MULTIPLE``."""
OWN_MULTIPLE = 2 << 20
ADDRESSES = 1 << 50

RELEASE = -1
"""Key of the event that the device gets all memory back in which no tensor is."""

Event = tuple[int, int, int]
"""Key of a storage, its bytes from now on, and the stream that it is allocated on."""


def rounded(size: int, multiple: int) -> int:
    """Return the smallest multiple that is not below ``size``."""
    return -(-size // multiple) * multiple


class Ranges:
    """Ranges of addresses. Ranges side by side are joined."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        """Sizes by first address."""
        self.starts: dict[int, int] = {}
        """First addresses by the address after the last."""
        self.ordered: list[tuple[int, int]] = []
        """Sizes and first addresses, the smallest first."""

    def add(self, at: int, size: int) -> None:
        """Add the ``size`` addresses from ``at`` on."""
        if size == 0:
            return
        before = self.starts.get(at, at)
        size += self.remove(at + size) if at + size in self.sizes else 0
        size += self.remove(before) if before < at else 0
        self.sizes[before] = size
        self.starts[before + size] = before
        insort(self.ordered, (size, before))

    def remove(self, at: int) -> int:
        """Remove the range that begins at ``at``, and return its size."""
        size = self.sizes.pop(at)
        del self.starts[at + size]
        del self.ordered[bisect_left(self.ordered, (size, at))]
        return size


class Pool:
    """Memory of the small, or of the large, tensors of one stream.

    Fixed segments stay as they are made. An expandable segment is a range of addresses that gets
    memory from its beginning on.
    """

    def __init__(self, *, small: bool, expandable: bool):
        self.reserved = 0
        self.free = Ranges()
        self._without_memory = Ranges()
        self._expandable = expandable
        self._segment = SMALL_SEGMENT if small else LARGE_SEGMENT
        self._least_rest = BLOCK if small or expandable else SMALL + 1
        self._fixed: dict[int, int] = {}
        self._next = 0
        if expandable:
            self._without_memory.add(0, ADDRESSES)

    def allocate(self, size: int) -> tuple[int, int]:
        """Return the first address and the size of a block of at least ``size`` bytes."""
        blocks = self.free.ordered
        place = bisect_left(blocks, (size, 0))
        if place == len(blocks):
            self._reserve(size)
            place = bisect_left(blocks, (size, 0))
        while place + 1 < len(blocks) and self._room(blocks[place + 1]) < self._room(blocks[place]):
            place += 1
        at = blocks[place][1]
        whole = self.free.remove(at)
        if whole - size < self._least_rest:
            return at, whole
        self.free.add(at + size, whole - size)
        return at, size

    def _room(self, block: tuple[int, int]) -> int:
        """Return the size of a free block with the addresses behind it that have no memory."""
        size, at = block
        return size + self._without_memory.sizes.get(at + size, 0)

    def _reserve(self, size: int) -> None:
        """Make a free block of at least ``size`` bytes."""
        if self._expandable:
            self._expand(self._place_for(size), size)
            return
        bytes = rounded(size, OWN_MULTIPLE) if size >= OWN_SEGMENT else self._segment
        self._fixed[self._next] = bytes
        self.free.add(self._next, bytes)
        self.reserved += bytes
        self._next += 2 * bytes  # no segment is joined with another one

    def _place_for(self, size: int) -> int:
        """Return the first of ``size`` addresses in a row that no tensor has."""
        for start in sorted(self._without_memory.sizes):
            first = end = self.free.starts.get(start, start)
            while end - first < size:
                more = self.free.sizes.get(end) or self._without_memory.sizes.get(end)
                if more is None:
                    break
                end += more
            else:
                return first
        raise AssertionError("the last addresses have no memory")

    def _expand(self, first: int, size: int) -> None:
        while (has := self.free.sizes.get(first, 0)) < size:
            end = first + has
            left = self._without_memory.remove(end)
            more = min(rounded(size - has, self._segment), left)
            self._without_memory.add(end + more, left - more)
            self.free.add(end, more)
            self.reserved += more

    def release(self) -> None:
        """Give back fixed segments, and parts of the expandable one, that are free."""
        for at, size in [*self.free.sizes.items()]:
            first, last = at, at + size
            if self._expandable:
                first, last = rounded(at, self._segment), last // self._segment * self._segment
            elif self._fixed.get(at) != size:
                continue
            if first >= last:
                continue
            self.free.remove(at)
            self.free.add(at, first - at)
            self.free.add(last, at + size - last)
            self.reserved -= last - first
            if self._expandable:
                self._without_memory.add(first, last - first)


class Allocator:
    """Memory of a GPU that torch reserves for a sequence of events, in bytes."""

    def __init__(self, *, expandable: bool):
        """``expandable``: whether segments are expandable, as those of trainers are."""
        self.allocated = self.most_allocated = 0
        self.reserved = self.most_reserved = 0
        self.kept = 0
        """Memory that stayed reserved when the device last got memory back."""
        self._expandable = expandable
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._held: dict[int, tuple[Pool, int, int]] = {}

    def follow(self, events: Iterable[Event]) -> None:
        """Allocate and free memory in the order of ``events``."""
        for key, bytes, stream in events:
            if key == RELEASE:
                for pool in self._pools.values():
                    pool.release()
                self.reserved = self.kept = sum(pool.reserved for pool in self._pools.values())
                continue
            self.free(key)
            if bytes:
                self._allocate(key, rounded(bytes, BLOCK), stream)

    def free(self, key: int) -> None:
        """Free the memory of storage ``key``, if it has any."""
        if key in self._held:
            pool, at, size = self._held.pop(key)
            pool.free.add(at, size)
            self.allocated -= size

    def _allocate(self, key: int, size: int, stream: int) -> None:
        small = size <= SMALL
        if (stream, small) not in self._pools:
            self._pools[stream, small] = Pool(small=small, expandable=self._expandable)
        pool = self._pools[stream, small]
        before = pool.reserved
        self._held[key] = pool, *pool.allocate(size)
        self.allocated += self._held[key][2]
        self.reserved += pool.reserved - before
        self.most_allocated = max(self.most_allocated, self.allocated)
        self.most_reserved = max(self.most_reserved, self.reserved)


def after_steps(
    first: Sequence[Event], recorded: Sequence[Sequence[Event]], count: int, *, expandable: bool
) -> dict[str, int]:
    """Return the largest sizes over the events ``first`` and ``count`` steps after these, each one
    of the ``recorded`` by chance. ``grown`` is what the steps added to the reserved memory.
    """
    allocator = Allocator(expandable=expandable)
    allocator.follow(first)
    before = allocator.most_reserved
    lasting = {key for key, _, _ in first}
    for step in random.Random(0).choices(recorded, k=count):
        allocator.follow(step)
        for key in {key for key, _, _ in step} - lasting:
            allocator.free(key)
    return {
        "allocated": allocator.most_allocated,
        "reserved": allocator.most_reserved,
        "grown": allocator.most_reserved - before,
        "kept": allocator.kept,
    }
