"""Model of torch's allocator of GPU memory: what it reserves for a sequence of tensors.

Rules and sizes are those of torch's ``c10/cuda/CUDACachingAllocator.cpp``. The allocator reserves
segments. A tensor takes the smallest free block of its stream that is large enough, and the rest of
the block stays free. Small tensors have segments of their own. No memory is given back.
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

Event = tuple[int, int, int]
"""Key of a storage, its bytes from now on, and the stream that it is allocated on."""


def rounded(size: int, multiple: int) -> int:
    """Return the smallest multiple that is not below ``size``."""
    return -(-size // multiple) * multiple


class Pool:
    """Blocks of the small, or of the large, tensors of one stream. Free blocks side by side are
    joined. An expandable segment grows at its end; a fixed one stays as it is.
    """

    def __init__(self, *, small: bool, expandable: bool):
        self.reserved = 0
        self._expandable = expandable
        self._segment = SMALL_SEGMENT if small else LARGE_SEGMENT
        self._least_rest = BLOCK if small or expandable else SMALL + 1
        self._end = 0
        self._free: list[tuple[int, int]] = []  # sizes and addresses, the smallest first
        self._sizes: dict[int, int] = {}  # of free blocks, by address
        self._starts: dict[int, int] = {}  # their addresses, by those after their ends

    def allocate(self, size: int) -> tuple[int, int]:
        """Return the address and the size of a block of at least ``size`` bytes."""
        if not self._free or self._free[-1][0] < size:
            if self._expandable:
                has = self._end - self._starts.get(self._end, self._end)
                bytes = rounded(size - has, self._segment)
            else:
                bytes = rounded(size, OWN_MULTIPLE) if size >= OWN_SEGMENT else self._segment
                self._end += BLOCK  # fixed segments are not joined
            self.free(self._end, bytes)
            self._end += bytes
            self.reserved += bytes
        place = bisect_left(self._free, (size, 0))
        at = self._free[place][1]
        grows = self._expandable and at + self._sizes[at] == self._end
        if grows and place + 1 < len(self._free):  # the block that can grow is taken last
            at = self._free[place + 1][1]
        whole = self._remove(at)
        if whole - size < self._least_rest:
            return at, whole
        self.free(at + size, whole - size)
        return at, size

    def free(self, at: int, size: int) -> None:
        """Add a free block."""
        first = self._starts.get(at, at)
        size += self._remove(at + size) if at + size in self._sizes else 0
        size += self._remove(first) if first < at else 0
        self._sizes[first] = size
        self._starts[first + size] = first
        insort(self._free, (size, first))

    def _remove(self, at: int) -> int:
        size = self._sizes.pop(at)
        del self._starts[at + size]
        del self._free[bisect_left(self._free, (size, at))]
        return size


class Allocator:
    """Memory of a GPU that torch reserves for a sequence of events, in bytes."""

    def __init__(self, *, expandable: bool):
        """``expandable``: whether segments are expandable, as those of trainers are."""
        self.allocated = self.most_allocated = 0
        self._expandable = expandable
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._held: dict[int, tuple[Pool, int, int]] = {}

    @property
    def reserved(self) -> int:
        """Sum of all segments."""
        return sum(pool.reserved for pool in self._pools.values())

    def follow(self, events: Iterable[Event]) -> None:
        """Allocate and free memory in the order of ``events``."""
        for key, bytes, stream in events:
            self.free(key)
            if bytes:
                small = bytes <= SMALL
                if (stream, small) not in self._pools:
                    self._pools[stream, small] = Pool(small=small, expandable=self._expandable)
                pool = self._pools[stream, small]
                self._held[key] = pool, *pool.allocate(rounded(bytes, BLOCK))
                self.allocated += self._held[key][2]
                self.most_allocated = max(self.most_allocated, self.allocated)

    def free(self, key: int) -> None:
        """Free the memory of storage ``key``, if it has any."""
        if key in self._held:
            pool, at, size = self._held.pop(key)
            pool.free(at, size)
            self.allocated -= size


def after_steps(
    first: Sequence[Event], recorded: Sequence[Sequence[Event]], count: int, *, expandable: bool
) -> dict[str, int]:
    """Return the sizes after the events ``first`` and ``count`` steps, each one of the ``recorded``
    by chance. ``grown`` is what the steps added to the reserved memory.
    """
    allocator = Allocator(expandable=expandable)
    allocator.follow(first)
    before = allocator.reserved
    lasting = {key for key, _, _ in first}
    for step in random.Random(0).choices(recorded, k=count):
        allocator.follow(step)
        for key in {key for key, _, _ in step} - lasting:
            allocator.free(key)
    reserved = allocator.reserved
    return {
        "allocated": allocator.most_allocated,
        "reserved": reserved,
        "grown": reserved - before,
    }
