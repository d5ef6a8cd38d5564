"""Bytes that a push moves, and its minimum time."""

from collections import Counter
from dataclasses import dataclass

from rl.plan.planned_run import PlannedRun, seat_of
from rl.weights.routes import plan_push
from rl.weights.transport import RELAYS


@dataclass(frozen=True, slots=True)
class Push:
    """One push of the whole policy to all generators, sizes in bytes."""

    transport: str
    total: int
    per_reader: tuple[int, ...]
    """Bytes that each rank of a generator reads."""
    most_from_a_rank: int
    """Largest number of bytes that leave one trainer rank."""
    over_network: bool
    bottleneck: str
    seconds: float
    """Minimum time: the time of the busiest rank at the full rate of its link."""


def push_of(run: PlannedRun) -> Push:
    """Return the push between the config's layouts and places.

    The rate of a device is that of:

    - its network adapter between hosts;
    - its link to other GPUs with ``cuda_ipc``;
    - its memory on CPU;
    - its network adapter for a copy through the host's memory, since PCIe is about as fast.
    """
    device = run.device
    size = run.transfer_bytes
    elements = plan_push(run.pushed, run.wanted).elements()
    read = [each.total() * size for each in elements]
    copies = [_copies(run, rank) for rank in range(len(elements))]
    sent: Counter[int] = Counter()
    for each, (direct, _) in zip(elements, copies, strict=True):
        for source, count in each.items():
            sent[source] += count * size * direct
    crosses = run.push_crosses_hosts
    if crosses or (run.cuda and run.transport != "cuda_ipc"):
        rate = device.network_gb_s
        link = "network adapter" if crosses else "way to the host's memory"
    elif run.cuda:
        rate = device.link_gb_s
        link = "link between GPUs"
    else:
        rate = device.memory_gb_s
        link = "memory"
    sender = max(sent.values())
    reader = max(own * max(1, onward) for own, (_, onward) in zip(read, copies, strict=True))
    end = "a trainer rank's" if sender > reader else "a generator rank's"
    return Push(
        transport=run.transport,
        total=sum(read) * len(run.generators),
        per_reader=tuple(read),
        most_from_a_rank=sender,
        over_network=crosses,
        bottleneck=f"{end} {link}, {rate:g} GB/s",
        seconds=max(sender, reader) / (rate * 1e9),
    )


def _copies(run: PlannedRun, rank: int) -> tuple[int, int]:
    """Return the number of times that the trainer sends what rank ``rank`` of all generators reads,
    and that such a rank sends it on to other hosts at most.
    """
    if run.transport not in RELAYS:
        return len(run.generators), 0
    hosts = {seat_of(place, rank)[0] for place in run.generators}
    hosts -= {run.places["trainer"].first_host}
    direct = min(run.rl.weights.fan_out, len(hosts))
    return direct or 1, min(run.rl.weights.fan_out, len(hosts) - direct)
