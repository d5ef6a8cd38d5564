"""Bytes that a push moves, and that models move which share devices, with their minimum times."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rl.plan.memory import RankMemory
from rl.plan.planned_run import PlannedRun, seat_of
from rl.weights.routes import plan_push
from rl.weights.transport import NETWORKS, ON_DEVICE, RELAYS, TransportName

MOVED = ("parameters", "adapters", "merged weights", "optimizer states")
"""Items that a model takes along. Gradients are gone when devices change hands."""


@dataclass(frozen=True, slots=True)
class Move:
    """Bytes that the busiest rank moves over its link, and their time at the full rate."""

    what: str
    """Stage of a push, or role."""
    link: str
    bytes: int
    seconds: float


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
    stages: tuple[Move, ...]
    """``publish``, ``fetch`` and ``pull``, one after another."""
    seconds: float
    """Minimum time: the sum of the stages."""


def transports(run: PlannedRun) -> list[TransportName]:
    """Return the transports that can push between the run's places, that of the run first."""
    names: list[TransportName] = [run.transport, "collective", "tcp", "rdma"]
    local: list[TransportName] = ["shared_memory", "cuda_ipc"] if run.cuda else ["shared_memory"]
    return list(dict.fromkeys(names if run.push_crosses_hosts else [*names, *local]))


def push_of(run: PlannedRun, transport: TransportName) -> Push:
    """Return the push by ``transport`` between the config's layouts and places.

    - ``publish``: A trainer rank copies its shards to the host, unless its slots are on its GPU.
    - ``fetch``: Bytes travel between hosts, at the rate of a network adapter.
    - ``pull``: A generator rank copies what it reads from the host, or with ``cuda_ipc`` from GPUs.
    """
    size = run.transfer_bytes
    elements = plan_push(run.pushed, run.wanted).elements()
    read = [counts.total() * size for counts in elements]
    copies = [_copies(run, rank, transport) for rank in range(len(elements))]
    sent: Counter[int] = Counter()
    for counts, (direct, _) in zip(elements, copies, strict=True):
        for source, count in counts.items():
            sent[source] += count * size * direct
    sends = max(sent.values())
    onward = max(share * max(1, onward) for share, (_, onward) in zip(read, copies, strict=True))
    shards = size * max(sum(region.box.numel for region in layout) for layout in run.pushed)
    stages = []
    if transport not in ON_DEVICE:
        stages.append(_to_host(run, "publish", shards))
    if transport in NETWORKS:
        seconds = max(sends, onward) / (run.device.network_gb_s * 1e9)
        stages.append(Move("fetch", "network adapter", max(sends, onward), seconds))
    if transport == "cuda_ipc":
        seconds = max(sends, *read) / (run.device.link_gb_s * 1e9)
        stages.append(Move("pull", "link between GPUs", max(sends, *read), seconds))
    else:
        stages.append(_to_host(run, "pull", max(read)))
    return Push(
        transport=transport,
        total=sum(read) * len(run.generators),
        per_reader=tuple(read),
        most_from_a_rank=sends,
        over_network=run.push_crosses_hosts,
        stages=tuple(stages),
        seconds=sum(stage.seconds for stage in stages),
    )


def turns_of(run: PlannedRun, ranks: Sequence[RankMemory]) -> Iterator[Move]:
    """Yield what a rank of each role moves to the host when another role gets the shared devices,
    and back when the role returns. Generators drop their weights, which a push brings.
    """
    for role in run.roles:
        if len(run.shared) > 1 and role in run.shared:
            taken = (rank.named(*MOVED) for rank in ranks if rank.role == role)
            moved = ([item.bytes for item in items if not item.on_host] for items in taken)
            yield _to_host(run, role, max(map(sum, moved)))


def _to_host(run: PlannedRun, what: str, bytes: int) -> Move:
    """Return a move between a device and its host's memory. PCIe is about as fast as a network
    adapter.
    """
    rate = run.device.network_gb_s if run.cuda else run.device.memory_gb_s
    return Move(what, "way to the host's memory", bytes, bytes / (rate * 1e9))


def _copies(run: PlannedRun, rank: int, transport: TransportName) -> tuple[int, int]:
    """Return the number of times that the trainer sends what rank ``rank`` of all generators reads,
    and that such a rank sends it on to other hosts at most.
    """
    if transport not in RELAYS:
        return len(run.generators), 0
    hosts = {seat_of(place, rank)[0] for place in run.generators}
    hosts -= {run.places["trainer"].first_host}
    direct = min(run.rl.weights.fan_out, len(hosts))
    return direct or 1, min(run.rl.weights.fan_out, len(hosts) - direct)
