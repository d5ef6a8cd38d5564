"""Bytes that a push moves, and its minimum time."""

from collections import Counter
from dataclasses import dataclass

from rl.plan.setting import Setting
from rl.weights.routes import plan_push


@dataclass(frozen=True, slots=True)
class Push:
    """One push of the whole policy to all generators, sizes in bytes."""

    transport: str
    total: int
    per_reader: tuple[int, ...]
    """Bytes that each rank of a generator reads."""
    most_from_a_rank: int
    """Largest number of bytes that all generators read from one trainer rank."""
    over_network: bool
    bottleneck: str
    seconds: float
    """Minimum time: the time of the busiest rank at the full rate of its link."""


def push_of(setting: Setting) -> Push:
    """Return the push between the config's layouts and places.

    The rate of a device is that of:

    - its network adapter between hosts;
    - its link to other GPUs with ``cuda_ipc``;
    - its memory on CPU;
    - its network adapter for a copy through the host's memory, since PCIe is about as fast.
    """
    device = setting.device
    size = setting.transfer_bytes
    elements = plan_push(setting.pushed, setting.wanted).elements()
    read = [each.total() * size for each in elements]
    sent: Counter[int] = Counter()
    for each in elements:
        for source, count in each.items():
            sent[source] += count * size * len(setting.generators)
    crosses = setting.push_crosses_hosts
    if crosses or (setting.cuda and setting.transport != "cuda_ipc"):
        rate = device.network_gb_s
        link = "network adapter" if crosses else "way to the host's memory"
    elif setting.cuda:
        rate = device.link_gb_s
        link = "link between GPUs"
    else:
        rate = device.memory_gb_s
        link = "memory"
    sender = max(sent.values())
    reader = max(read)
    end = "a trainer rank's" if sender > reader else "a generator rank's"
    return Push(
        transport=setting.transport,
        total=sum(read) * len(setting.generators),
        per_reader=tuple(read),
        most_from_a_rank=sender,
        over_network=crosses,
        bottleneck=f"{end} {link}, {rate:g} GB/s",
        seconds=max(sender, reader) / (rate * 1e9),
    )
