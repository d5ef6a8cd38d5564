"""The machines of a run: what their devices can do, and how Slurm is asked for them."""

import os
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from torchtitan.tools.utils import has_cuda_capability, has_rocm_capability

from rl.errors import require
from rl.platform import device_count, device_name, device_type
from rl.rules import MAX_NODES, YEAR_S, above, at_least

DeviceName = Literal["cpu", "a100", "h100", "h200", "b200"]


MAX_GPUS = 1024
_FIGURE = at_least(0, 1e6)


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """Figures of one device as its data sheet has them: dense rates, decimal prefixes, one
    direction of a link.
    """

    memory_gib: float
    tflops: float
    """In bfloat16."""
    float8_tflops: float
    """0 where it does not compute in float8."""
    memory_gb_s: float
    link_gb_s: float
    """To the other devices of its node."""
    network_gb_s: float
    """To other nodes: the device's own share."""


# Sources: NVIDIA's data sheets of A100 80GB SXM, H100 SXM, H200 SXM and HGX B200, with one 200
# (A100) or 400 Gb/s adapter for each; memory is what their drivers report. The CPU's figures are
# those of one common server core.
DEVICES: dict[DeviceName, Device] = {
    "cpu": Device(
        memory_gib=4, tflops=0.05, float8_tflops=0, memory_gb_s=10, link_gb_s=5, network_gb_s=1
    ),
    "a100": Device(
        memory_gib=79, tflops=312, float8_tflops=0, memory_gb_s=2039, link_gb_s=300, network_gb_s=25
    ),
    "h100": Device(
        memory_gib=79,
        tflops=989,
        float8_tflops=1979,
        memory_gb_s=3350,
        link_gb_s=450,
        network_gb_s=50,
    ),
    "h200": Device(
        memory_gib=139,
        tflops=989,
        float8_tflops=1979,
        memory_gb_s=4800,
        link_gb_s=450,
        network_gb_s=50,
    ),
    "b200": Device(
        memory_gib=178,
        tflops=2250,
        float8_tflops=4500,
        memory_gb_s=7700,
        link_gb_s=900,
        network_gb_s=50,
    ),
}


def _known(name: str) -> DeviceName:
    """The device whose driver gives it this name."""
    found: list[DeviceName] = [known for known in DEVICES if known in name.lower()]
    require(
        bool(found),
        f"hardware.device is 'auto', and nothing is known of this host's {name}; name the nearest "
        f"of {list(DEVICES)} and what it has else, such as hardware.memory_gib",
    )
    return found[0]


@dataclass(kw_only=True, slots=True)
class HardwareConfig:
    """What a run is to run on; ``plan`` counts with it, and a run refuses to start on something
    else.
    """

    device: Literal["auto", DeviceName] = "auto"
    """``auto``: whatever the host has on which the config is read. Name it where that is another,
    as a login node."""

    gpus_per_node: Annotated[int, at_least(0, MAX_GPUS)] = 0
    """0 for as many as this host has."""

    memory_gib: Annotated[float, _FIGURE] = 0.0
    """Of a device, as the other figures; 0 for what its data sheet says. On CPU, of a rank."""

    tflops: Annotated[float, _FIGURE] = 0.0
    memory_gb_s: Annotated[float, _FIGURE] = 0.0
    link_gb_s: Annotated[float, _FIGURE] = 0.0
    network_gb_s: Annotated[float, _FIGURE] = 0.0

    host_memory_gib: Annotated[float, _FIGURE] = 0.0
    """Of a node, for all its ranks; 0 for 2048 where there are GPUs, else for what this host
    has."""

    training_efficiency: Annotated[float, above(0, 1)] = 0.4
    """Share of ``tflops`` that training keeps up (MFU): an assumption of ``plan``, to be replaced
    by what you see."""

    generation_efficiency: Annotated[float, above(0, 1)] = 0.6
    """Share of ``memory_gb_s`` that generation keeps up: another."""

    @property
    def kind(self) -> Literal["cpu", "cuda"]:
        """What the run computes on."""
        if self.device == "auto":
            return "cuda" if device_type() == "cuda" else "cpu"
        return "cpu" if self.device == "cpu" else "cuda"

    def require_here(self) -> None:
        """Raise ConfigError unless this host computes on it."""
        require(
            self.kind == device_type(),
            f"hardware.device is {self.device!r}; this host computes on {device_type()}: start the "
            "run where the device is, or give --hardware.device auto",
        )

    @property
    def computes_float8(self) -> bool:
        """Without emulating it."""
        if self.device == "auto":
            return has_cuda_capability(8, 9) or has_rocm_capability(9, 4)
        return DEVICES[self.device].float8_tflops > 0

    @property
    def figures(self) -> Device:
        """Of its device: those given here, else those of the data sheet."""
        named = (
            self.device
            if self.device != "auto"
            else _known(device_name())
            if self.kind == "cuda"
            else "cpu"
        )
        given = {
            name: getattr(self, name)
            for name in ("memory_gib", "tflops", "memory_gb_s", "link_gb_s")
        }
        given["network_gb_s"] = self.network_gb_s
        return replace(DEVICES[named], **{name: value for name, value in given.items() if value})

    @property
    def host_gib(self) -> float:
        """Memory of a node."""
        here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        return self.host_memory_gib or (2048.0 if self.kind == "cuda" else here)

    @property
    def gpus(self) -> int:
        """Of each node; 0 on CPU."""
        return 0 if self.kind == "cpu" else self.gpus_per_node or device_count()


@dataclass(kw_only=True, slots=True)
class SlurmConfig:
    """What ``python -m rl.launch slurm`` asks for.

    What is empty or 0 is left to the site's defaults.
    """

    partition: str = ""
    account: str = ""
    qos: str = ""
    time: str = ""
    """Limit, as Slurm writes it: minutes, HH:MM:SS or D-HH:MM:SS. A run that needs longer goes on
    after it."""

    nodes: Annotated[int, at_least(0, MAX_NODES)] = 0
    """0 for as many as trainer and generators need; more are spares for nodes that do not come
    up."""

    gpus_per_node: Annotated[int | None, at_least(0, MAX_GPUS)] = None
    """None for hardware.gpus_per_node. 0 asks for none, where ``extra`` has the site's own way to
    say it."""

    cpus_per_node: Annotated[int, at_least(0, 10**5)] = 0
    """CPUs of each node."""

    memory: str = ""
    """Of each node, as ``500G``; ``0`` for all of it."""

    constraint: str = ""
    nodelist: str = ""
    exclude: str = ""
    exclusive: bool = True
    """Whether to have the nodes alone."""

    extra: list[str] = field(default_factory=list)
    """More options of sbatch, as ``--reservation=mine``."""

    environment: dict[str, str] = field(default_factory=dict)
    """Variables for every process. They stand in the script: secrets do not belong here, they are
    inherited from the shell that submits."""

    prelude: list[str] = field(default_factory=list)
    """Lines of bash before anything else on the first node, as ``module load cuda``; all nodes get
    what they export."""

    container_image: str = ""
    """Run in this image, by Slurm's pyxis, with its ``python``; Tiller lies there, or is mounted,
    where it is here."""

    container_mounts: list[str] = field(default_factory=list)
    """``HOST:CONTAINER`` folders; the run folder and the current folder among them."""

    warn_s: Annotated[int, at_least(1, YEAR_S)] = 300
    """Seconds before the limit at which the run is told to finish its step, save and leave. More
    than both take."""

    max_restarts: Annotated[int, at_least(0, 10**6)] = 20
    """Attempts after the first, whatever ended it: limit, preemption, a lost node."""

    @property
    def time_s(self) -> int | None:
        """Seconds of ``time``; None where that is empty.

        Raises ValueError for what is no time of Slurm's.
        """
        if not self.time:
            return None
        days, dash, clock = self.time.rpartition("-")
        parts = [int(part) for part in clock.split(":")]
        if len(parts) > 3:
            raise ValueError(self.time)
        hours_first = dash or len(parts) == 3
        hours, minutes, seconds = [*parts, 0, 0][:3] if hours_first else [0, *parts, 0][:3]
        return ((int(days if dash else 0) * 24 + hours) * 60 + minutes) * 60 + seconds


@dataclass(kw_only=True, slots=True)
class KubernetesConfig:
    """What ``python -m rl.launch kubernetes`` renders.

    The manifests are tested; no run on a cluster was.
    """

    namespace: str = "default"
    image: str = ""
    """With Tiller in it, where it is on this host, and its packages for ``python``."""

    claim: str = ""
    """A PersistentVolumeClaim that many nodes can write; the run folder and what the run reads lie
    there."""

    mount: str = "/runs"
    """Where pods have it."""

    secret: str = ""
    """A Secret whose entries every process gets as variables."""

    shared_memory: str = "64Gi"
    """Most that a node's processes may have in /dev/shm."""

    warn_s: Annotated[int, at_least(1, YEAR_S)] = 300
    """Seconds that a pod has to save when it is told to end."""

    max_restarts: Annotated[int, at_least(0, 10**6)] = 20
    """Attempts after the first."""
