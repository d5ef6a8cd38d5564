"""Ledger of a rehearsed device: memory, collectives, waits of the host, and assumptions; and a
model of torch's allocator of GPU memory: what it reserves for a sequence of tensors.

Rules and sizes of the allocator are those of torch's ``c10/cuda/CUDACachingAllocator.cpp``. It
reserves segments. A tensor takes the smallest free block of its stream that is large enough, and
the rest of the block stays free. Small tensors have segments of their own. No memory is given back.
"""

import random
import sys
import traceback
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

import torch.distributed.fsdp
import torch.optim
import torchtitan

from rl.plan.memory import pinned

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


LIBRARIES = (torchtitan, torch.distributed.fsdp, torch.optim)
PACKAGES = (str(Path(__file__).parents[2]), *(library.__path__[0] for library in LIBRARIES))
"""Folders whose code is named as the origin of an operator; the rest is torch's machinery."""
OWN = (f"{PACKAGES[0]}/plan/rehearsal/", f"{PACKAGES[0]}/compat/fake_cuda.py")
NAMED_FROM = 1 << 20  # bytes of an allocation from which its line is looked up
STEP = 1.002  # growth of the peak from which the allocations are listed again


@dataclass(frozen=True, slots=True)
class Allocation:
    """Memory of one storage."""

    bytes: int
    operator: str
    line: str
    phase: str


@dataclass
class Ledger:
    """Record of what a device would have done. All sizes are in bytes; a phase is a name."""

    used: int = 0
    peak: int = 0
    phase: str = "init"
    captures: bool = False
    """Whether a CUDA graph captures what runs, so that the host cannot wait."""
    live: dict[int, Allocation] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    """Changes of memory, for a model of the allocator."""
    at_peak: dict[int, Allocation] = field(default_factory=dict)
    """Allocations at the peak, to within a fifth of a percent."""
    peaks: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)
    syncs: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Number of waits of the host for the device, by phase, reason and line."""
    calls: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Number of collectives by phase, kind and line."""
    moved: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Bytes of these collectives: the largest tensor of each."""
    pinned: Counter[str] = field(default_factory=Counter)
    """Bytes of pinned host memory by phase."""
    assumed: Counter[str] = field(default_factory=Counter)
    """Number of times that a number was made up, by sentence."""

    def begin(self, phase: str) -> None:
        """End the current phase and begin another one."""
        self.end()
        self.phase = phase
        self.peaks[phase] = self.used

    def end(self) -> None:
        """End the current phase."""
        self.after[self.phase] = self.used

    def add(self, key: int, bytes: int, operator: str) -> None:
        """Record a new storage."""
        line = line_of_caller() if bytes >= NAMED_FROM else ""
        self.live[key] = Allocation(bytes, operator, line, self.phase)
        self._grow(key, bytes, bytes)

    def resize(self, key: int, bytes: int) -> None:
        """Record a new size of a storage."""
        before = self.live[key]
        self.live[key] = replace(before, bytes=bytes, phase=self.phase)
        self._grow(key, bytes, bytes - before.bytes)

    def drop(self, key: int) -> None:
        """Record that a storage is gone."""
        gone = self.live.pop(key, None)
        if gone is not None:
            self.used -= gone.bytes
            self.events.append((key, 0, 0))

    def wait(self, reason: str) -> None:
        """Record that the host waits for the device. Raises RuntimeError during a capture."""
        if self.captures:
            raise RuntimeError(f"a CUDA graph cannot capture this: {reason}")
        self.syncs[self.phase, reason, line_of_caller()] += 1

    def collective(self, kind: str, bytes: int) -> None:
        """Record a collective of ``bytes``."""
        key = (self.phase, kind, line_of_caller())
        self.calls[key] += 1
        self.moved[key] += bytes

    def pin(self, bytes: int) -> None:
        """Record a pinned tensor of the host."""
        self.pinned[self.phase] += pinned(bytes)

    def assume(self, sentence: str) -> None:
        """Record that a number was made up."""
        self.assumed[f"{sentence}: {line_of_caller()}"] += 1

    def _grow(self, key: int, bytes: int, change: int) -> None:
        self.events.append((key, bytes, torch.cuda.current_stream().stream_id))
        self.used += change
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.used)
        if self.used > self.peak * STEP:
            self.at_peak = dict(self.live)
        self.peak = max(self.peak, self.used)


def line_of_caller() -> str:
    """Return the innermost line of the code of Tiller, torchtitan, FSDP or an optimizer that is
    running, as "path:number function".
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if line := _named(frame, frame.f_lineno):
            return line
        frame = frame.f_back
    return "unknown line"


def line_of_error(error: BaseException) -> str:
    """Return the innermost of these lines at which ``error`` was raised."""
    steps = reversed([*traceback.walk_tb(error.__traceback__)])
    return next((line for frame, number in steps if (line := _named(frame, number))), "")


def _named(frame: FrameType, number: int) -> str:
    """Return the line of a frame, or an empty text if it is torch's machinery."""
    path = frame.f_code.co_filename
    if not path.startswith(PACKAGES) or path.startswith(OWN):
        return ""
    package = next(package for package in PACKAGES if path.startswith(package))
    shown = path[len(package) - len(Path(package).name) :]
    return f"{shown}:{number} {frame.f_code.co_name}"
