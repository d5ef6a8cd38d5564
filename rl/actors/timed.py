"""Answers of ranks with the times of their own work."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Stretch = tuple[str, float, float]
"""Name of some work, and its begin and end in Unix seconds of the rank's host."""

RANKS = 64
"""Ranks of a mesh whose work is recorded: the first ones. Events grow with the ranks."""


class Timed(NamedTuple):
    """Answer of an endpoint. The group that called it takes the work out."""

    answer: Any
    work: Sequence[Stretch]


def timed(name: str, call: Callable[..., Any], *args: Any) -> Timed:
    """Call a function; return its answer with the time that it took, as work ``name``."""
    begin = time.time()
    answer = call(*args)
    return Timed(answer, [(name, begin, time.time())])
