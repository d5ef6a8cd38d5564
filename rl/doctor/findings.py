"""Finding of a check."""

import re
from dataclasses import dataclass
from typing import Literal

from rl.errors import ConfigError

CORRECT = "correct it there"


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding, with its place and its fix."""

    room: str
    """Part that was checked: ``host``, ``config``, ``data``, ``reward`` or ``run``."""
    severity: Literal["error", "warning"]
    """``error`` if a run cannot work."""
    where: str
    """Field, file or property."""
    what: str
    fix: str

    def __str__(self) -> str:
        where = "" if self.what.startswith(self.where) else f"{self.where}: "
        return f"{self.severity:8} {where}{self.what}\n{'':8} fix: {self.fix}"


def error(room: str, where: str, what: str, fix: str) -> Finding:
    """Return a finding with which a run cannot work."""
    return Finding(room, "error", where, what, fix)


def warning(room: str, where: str, what: str, fix: str) -> Finding:
    """Return a finding with which a run may do other than intended."""
    return Finding(room, "warning", where, what, fix)


def refused(room: str, reason: Exception | str, cut: str = "; ") -> Finding:
    """Return the finding of an error: of its data, or of a sentence ``PLACE …; FIX``."""
    if isinstance(reason, ConfigError) and reason.field:
        return error(room, reason.field, reason.fault, reason.remedy)
    text = str(reason).splitlines()[0]
    what, _, fix = text.rpartition(cut)
    first = re.match(r"--config \S+|\S+", text)
    place = first[0].rstrip(":,;") if first else room
    return error(room, place, what or text, fix if what else CORRECT)
