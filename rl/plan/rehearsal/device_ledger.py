"""Ledger of a rehearsed device: memory, collectives, waits of the host, and assumptions."""

import sys
import traceback
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

import torch.distributed.fsdp
import torch.optim
import torchtitan

from rl.plan.memory import pinned
from rl.plan.rehearsal.allocator import Event

LIBRARIES = (torchtitan, torch.distributed.fsdp, torch.optim)
PACKAGES = (str(Path(__file__).parents[2]), *(each.__path__[0] for each in LIBRARIES))
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
