"""Config of the push of weights, and of the checks of its result."""

from dataclasses import dataclass
from typing import Annotated, Literal

from rl.rules import COSMETIC, PERFORMANCE, above, at_least

TransportName = Literal["shared_memory", "cuda_ipc", "rdma", "tcp", "torchstore"]


@dataclass(kw_only=True, slots=True)
class WeightPushConfig:
    """Push of the weights from the trainer to the generators after each step."""

    transport: Annotated[Literal["auto", TransportName], PERFORMANCE] = "auto"
    """Transport of the weights. ``auto`` uses shared memory if trainer and generators are on one
    host; otherwise RDMA if the controller's host has an RDMA device, else TCP. ``cuda_ipc`` copies
    from GPU to GPU of one host; ``torchstore`` goes through a store."""

    fan_out: Annotated[int, PERFORMANCE, at_least(1, 1024)] = 1
    """Number of hosts that the trainer's host, and each host of generators, sends the weights to
    (``tcp``). 1 is a chain: the trainer sends the weights once, however many generators there are.
    Raise it if a slow host delays the hosts after it. With as many as there are hosts of
    generators, each host reads from the trainer."""

    delta: Annotated[bool, PERFORMANCE] = False
    """Whether to send only the elements that changed if that is less (``tcp``, ``rdma`` and
    ``torchstore``). The weights are the same bit for bit."""

    digests: Annotated[bool, COSMETIC] = True
    """Whether to compare a digest of every parameter on every rank of trainer and generators after
    each push. In bfloat16 this is the only check that finds weights of an older version, which pass
    the canary. Both sides together take about 1.5 CPU seconds per GB pushed
    (``scripts/bench/weight_push.py``)."""

    min_gb_s: Annotated[float, above(0, 1e6), COSMETIC] = 0.1
    """Bandwidth of the slowest network that a push works with, in GB/s for the bytes of all
    generators together. A push fails if it takes longer than ``deadlines.push`` plus the time of
    its bytes at this rate; lower it for a slower network."""

    canary_tolerance: Annotated[float | None, at_least(0, 1e6), COSMETIC] = None
    """Maximum difference between the log-probs of trainer and generators on a fixed prompt after
    each push. None for 1e-3 if the generators compute in float32 and 0.5 in bfloat16; 0 disables
    the check."""
