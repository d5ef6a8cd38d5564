"""How weights get from the trainer to the generators, and how far that is trusted."""

from dataclasses import dataclass
from typing import Annotated, Literal

from rl.rules import COSMETIC, PERFORMANCE, above, at_least

TransportName = Literal["shared_memory", "cuda_ipc", "rdma", "torchstore"]


@dataclass(kw_only=True, slots=True)
class WeightPushConfig:
    """The push after each optimizer step."""

    transport: Annotated[Literal["auto", TransportName], PERFORMANCE] = "auto"
    """What carries the weights. ``auto`` takes shared memory where trainer and generators are on
    one host, RDMA else (over TCP where there is no RDMA). ``cuda_ipc`` goes from GPU to GPU of one
    host; ``torchstore`` puts a store in between."""

    delta: Annotated[bool, PERFORMANCE] = False
    """Send only the elements that changed where that is less (``rdma`` and ``torchstore``); bit for
    bit the same."""

    digests: Annotated[bool, COSMETIC] = True
    """Compare a digest of every parameter after each push, as every rank of the trainer and the
    generators has it. In bfloat16 only this finds weights of an older version: they pass the
    canary. Both sides together take about 1.5 CPU seconds per GB pushed
    (scripts/bench/weight_push.py)."""

    min_gb_s: Annotated[float, above(0, 1e6), COSMETIC] = 0.1
    """Slowest network that a push works with, in GB/s for the bytes of all generators together. A
    push has failed when it takes more than deadlines.push and the time of its bytes at this rate;
    lower it for a slower network."""

    canary_tolerance: Annotated[float | None, at_least(0, 1e6), COSMETIC] = None
    """Largest difference between the log-probs of trainer and generators, on a fixed prompt after
    each push, that the run goes on with. None: 1e-3 where the generators compute in float32, 0.5 in
    bfloat16. 0 for no canary."""
