"""Limits of a program in the sandbox, and its result."""

from dataclasses import dataclass
from typing import Literal

Limit = Literal["wall", "cpu", "memory", "threads", "disk", "output"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one program. It is one process: it cannot start others."""

    wall_s: float = 5.0
    """Seconds from the start of the program to its end."""

    cpu_s: int = 2
    """CPU seconds of all its threads together."""

    memory_mib: int = 512
    """Address space. The interpreter itself takes about 40 MiB."""

    threads: int = 16
    """Number of threads, the main thread included."""

    disk_mib: int = 8
    """Size of one file, and of all files of the program together."""

    output_bytes: int = 16_384
    """Bytes of standard output, and of standard error, that are returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """End of a program."""

    exit_code: int
    """Exit status of the program; negative: the signal that ended it."""

    stdout: str
    """Standard output, cut to ``Limits.output_bytes``. Bytes that are not UTF-8 are replaced."""

    stderr: str
    """Standard error, cut in the same way."""

    limit: Limit | None
    """Limit that the program ran into. ``wall`` and ``cpu`` ended it; ``output``: it wrote more
    than is returned. ``memory``, ``threads`` and ``disk`` are mostly derived from the exception
    that ended the program, so that a program can hide or pretend them.
    """

    seconds: float
    """Seconds from the start of the program to its end."""
