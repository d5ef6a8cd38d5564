"""Machines of a run: figures of their devices, and the settings of Slurm and Kubernetes."""

import os
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from torchtitan.tools.utils import has_cuda_capability, has_rocm_capability

from rl.errors import require
from rl.listening import NO_LOOPBACK, has_loopback
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
    """Dense bfloat16 throughput."""
    float8_tflops: float
    """0 if the device does not compute in float8."""
    memory_gb_s: float
    link_gb_s: float
    """Bandwidth to the other devices of the node."""
    network_gb_s: float
    """Bandwidth to other nodes: the device's own share."""


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


FIGURES = ("memory_gib", "tflops", "memory_gb_s", "link_gb_s", "network_gb_s")
"""Figures of a device that a config can give."""


def _known(name: str) -> DeviceName:
    """Return the device that the driver calls ``name``."""
    found: list[DeviceName] = [known for known in DEVICES if known in name.lower()]
    require(
        bool(found),
        f"hardware.device is 'auto', and nothing is known of this host's {name}; name the nearest "
        f"of {list(DEVICES)} and what it has else, such as hardware.memory_gib",
    )
    return found[0]


@dataclass(kw_only=True, slots=True)
class HardwareConfig:
    """Hardware that a run is planned for. ``python -m rl.plan`` computes with these figures, and a
    run refuses to start on another kind of device.
    """

    device: Literal["auto", DeviceName] = "auto"
    """Kind of device. ``auto`` takes that of the current host; name it if the run uses another, for
    example when it is submitted from a login node."""

    gpus_per_node: Annotated[int, at_least(0, MAX_GPUS)] = 0
    """Number of GPUs per node; 0 for as many as the current host has."""

    memory_gib: Annotated[float, _FIGURE] = 0.0
    """Memory of a device in GiB; on CPU, of a rank. 0 uses the data sheet's."""

    tflops: Annotated[float, _FIGURE] = 0.0
    """Dense bfloat16 throughput of a device in TFLOP/s. 0 uses the data sheet's."""

    memory_gb_s: Annotated[float, _FIGURE] = 0.0
    """Memory bandwidth of a device in GB/s. 0 uses the data sheet's."""

    link_gb_s: Annotated[float, _FIGURE] = 0.0
    """Bandwidth from a device to the others of its node, in GB/s in one direction. 0 uses the data
    sheet's."""

    network_gb_s: Annotated[float, _FIGURE] = 0.0
    """Bandwidth from a device to other nodes, in GB/s in one direction. 0 uses the data sheet's."""

    host_memory_gib: Annotated[float, _FIGURE] = 0.0
    """Memory of a node in GiB, for all its ranks. 0 for 2048 with GPUs, and for that of the current
    host on CPU."""

    training_efficiency: Annotated[float, above(0, 1)] = 0.4
    """Share of ``tflops`` that training achieves while it does not wait for collectives. An
    assumption of ``rl.plan``, to be replaced by a measured value."""

    generation_efficiency: Annotated[float, above(0, 1)] = 0.6
    """Share of ``memory_gb_s`` that generation achieves, an assumption as well."""

    @property
    def kind(self) -> Literal["cpu", "cuda"]:
        """Kind of backend that the run computes on."""
        if self.device == "auto":
            return "cuda" if device_type() == "cuda" else "cpu"
        return "cpu" if self.device == "cpu" else "cuda"

    def require_here(self) -> None:
        """Raise ConfigError unless this host has the device, and a loopback interface."""
        require(has_loopback(), f"network: {'; '.join(NO_LOOPBACK)}")
        require(
            self.kind == device_type(),
            f"hardware.device is {self.device!r}; this host computes on {device_type()}: start the "
            "run where the device is, or give --hardware.device auto",
        )

    @property
    def computes_float8(self) -> bool:
        """Whether the device computes in float8 without emulation."""
        if self.device == "auto":
            return has_cuda_capability(8, 9) or has_rocm_capability(9, 4)
        return DEVICES[self.device].float8_tflops > 0

    @property
    def figures(self) -> Device:
        """Figures of the device: those given here, otherwise those of the data sheet."""
        if self.device != "auto":
            named = self.device
        else:
            named = _known(device_name()) if self.kind == "cuda" else "cpu"
        given = {name: getattr(self, name) for name in FIGURES if getattr(self, name)}
        return replace(DEVICES[named], **given)

    @property
    def peak_tflops(self) -> float:
        """Dense bfloat16 throughput of a device in TFLOP/s; 0 if it is unknown, as on CPU."""
        known = self.kind == "cuda" and (
            self.device != "auto" or any(name in device_name().lower() for name in DEVICES)
        )
        return self.tflops or (self.figures.tflops if known else 0.0)

    @property
    def host_gib(self) -> float:
        """Memory of a node in GiB."""
        here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        return self.host_memory_gib or (2048.0 if self.kind == "cuda" else here)

    @property
    def gpus(self) -> int:
        """Number of GPUs per node; 0 on CPU."""
        return 0 if self.kind == "cpu" else self.gpus_per_node or device_count()


@dataclass(kw_only=True, slots=True)
class SlurmConfig:
    """Resources and options of ``python -m rl.launch slurm``.

    Empty fields and 0 leave a setting to the site's defaults.
    """

    partition: str = ""
    """Partition to submit to."""

    account: str = ""
    """Account to charge."""

    qos: str = ""
    """Quality of service to request."""

    time: str = ""
    """Time limit of an attempt in Slurm's format: minutes, ``HH:MM:SS`` or ``D-HH:MM:SS``. A run
    that needs longer resumes in the next attempt."""

    nodes: Annotated[int, at_least(0, MAX_NODES)] = 0
    """Number of nodes; 0 for as many as trainer and generators need. Any more are spares for nodes
    that do not come up."""

    gpus_per_node: Annotated[int | None, at_least(0, MAX_GPUS)] = None
    """Number of GPUs to request per node; None for ``hardware.gpus_per_node``. 0 requests none, for
    sites whose own option is given in ``extra``."""

    cpus_per_node: Annotated[int, at_least(0, 10**5)] = 0
    """Number of CPUs to request per node."""

    memory: str = ""
    """Memory to request per node, such as ``500G``; ``0`` for all of it. Empty for all of it if
    ``exclusive`` is set, and otherwise for the site's default, which may be a share of a node."""

    constraint: str = ""
    """Features that nodes must have."""

    nodelist: str = ""
    """Nodes that the job must get."""

    exclude: str = ""
    """Nodes that the job must not get."""

    exclusive: bool = True
    """Whether to share the nodes with no other job."""

    extra: list[str] = field(default_factory=list)
    """Additional options of sbatch, such as ``--reservation=mine``."""

    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of every process. They are written to the job script, so do not put
    secrets here: these are inherited from the shell that submits."""

    prelude: list[str] = field(default_factory=list)
    """Lines of bash that run before anything else on the first node, such as ``module load cuda``.
    All nodes get the variables that they export."""

    container_image: str = ""
    """Image to run in, by Slurm's pyxis, with its ``python``. Tiller must be in the image, or be
    mounted, at the same path as here."""

    container_mounts: list[str] = field(default_factory=list)
    """Folders to mount, as ``HOST:CONTAINER``. They must include the run folder and the current
    folder."""

    warn_s: Annotated[int, at_least(1, YEAR_S)] = 300
    """Number of seconds before the time limit at which the run gets the signal to finish its step,
    save and exit. Must be longer than both take."""

    max_restarts: Annotated[int, at_least(0, 10**6)] = 20
    """Number of attempts after the first, whatever ended it: the time limit, a preemption or a lost
    node."""

    @property
    def time_s(self) -> int | None:
        """Number of seconds in ``time``; None if it is empty.

        Raises ValueError if it is not in Slurm's format.
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
    """Settings of the manifests that ``python -m rl.launch kubernetes`` renders.

    The manifests are tested; they have not been run on a cluster.
    """

    namespace: str = "default"
    """Namespace of the objects."""

    image: str = ""
    """Image with Tiller in ``source``, and its packages installed for ``python``, such as the one
    that the ``Dockerfile`` of Tiller builds."""

    source: str = "/opt/tiller"
    """Folder in the image that holds ``rl`` and ``configs``, by default that of the
    ``Dockerfile``. Pods start in the folder, so modules of your own belong there."""

    claim: str = ""
    """PersistentVolumeClaim that many nodes can write. It holds the run folder and the files that
    the run reads."""

    mount: str = "/runs"
    """Path at which pods mount the claim."""

    secret: str = ""
    """Secret whose entries become environment variables of every process; empty for none."""

    node_selector: dict[str, str] = field(default_factory=dict)
    """Labels that a node must have to get a pod."""

    tolerations: list[str] = field(default_factory=list)
    """Taints of nodes that pods tolerate, as ``kubectl taint`` writes taints: ``KEY=VALUE:EFFECT``,
    ``KEY:EFFECT`` for any value, ``KEY`` for any value and effect."""

    memory: str = ""
    """Memory of a node's pod, such as ``900Gi``, /dev/shm included; empty for no limit."""

    rdma: dict[str, str] = field(default_factory=dict)
    """Number of RDMA devices of a node's pod by resource, such as ``rdma/hca 8``. The pod also gets
    the capability to lock memory."""

    shared_memory: str = "64Gi"
    """Maximum size of /dev/shm for the processes of a node."""

    warn_s: Annotated[int, at_least(1, YEAR_S)] = 300
    """Number of seconds that a pod has for saving before it ends."""

    max_restarts: Annotated[int, at_least(0, 10**6)] = 20
    """Number of attempts after the first."""
