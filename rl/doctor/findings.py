"""Finding of a check."""

from dataclasses import dataclass
from typing import Literal

from rl.errors import ConfigError, RunError

CORRECT = "correct it there"


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding, with its place and its fix."""

    room: str
    """Part that was checked: ``host``, ``config``, ``data``, ``reward`` or ``run``."""
    severity: Literal["error", "warning", "note"]
    """``error`` if a run cannot work; ``note`` if nothing is wrong."""
    where: str
    """Field, file or property."""
    what: str
    fix: str

    def __str__(self) -> str:
        where = "" if self.what.startswith(self.where) else f"{self.where}: "
        fix = f"\n{'':8} fix: {self.fix}" if self.fix else ""
        return f"{self.severity:8} {where}{self.what}{fix}"


def error(room: str, where: str, what: str, fix: str) -> Finding:
    """Return a finding with which a run cannot work."""
    return Finding(room, "error", where, what, fix)


def warning(room: str, where: str, what: str, fix: str) -> Finding:
    """Return a finding with which a run may do other than intended."""
    return Finding(room, "warning", where, what, fix)


def refused(
    room: str,
    reason: ConfigError | RunError,
    where: str = "",
    severity: Literal["error", "warning"] = "error",
) -> Finding:
    """Return the finding of an error in ``where``, by default the field of the error."""
    if isinstance(reason, RunError):
        reason = ConfigError(str(reason))
    what = reason.fault.splitlines()[0]
    fix = reason.remedy.partition("\n")[0]
    return Finding(room, severity, where or reason.field or room, what, fix or CORRECT)
