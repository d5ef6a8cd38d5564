"""Deadlines of processes."""

from dataclasses import dataclass
from typing import Annotated

from rl.types.rules import NUMERICS, SECONDS, YEAR_S, at_least


@dataclass(kw_only=True, slots=True)
class DeadlineConfig:
    """Maximum waiting times, in seconds. A process that exceeds one is treated as dead, and the
    error names it.
    """

    start: Annotated[float, SECONDS] = 600.0
    """Time for a mesh to start, including imports and construction of the model."""

    call: Annotated[float, SECONDS] = 600.0
    """Time for a call to an actor, such as training on a batch; in a call to a generator, the time
    without a sampled token."""

    heartbeat: Annotated[float, at_least(0, YEAR_S)] = 60.0
    """Time between signs of life of a rank; a rank that gives none is treated as dead. 0 treats no
    silent rank as dead."""

    push: Annotated[float, SECONDS] = 60.0
    """Time for a policy version to reach the generators, on top of the time of its bytes at
    ``weights.min_gb_s``."""

    reward: Annotated[float, SECONDS, NUMERICS] = 60.0
    """Time for the rewards of one group."""
