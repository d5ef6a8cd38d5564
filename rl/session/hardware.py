"""Hardware that a run is planned for: figures of its devices."""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torchtitan.tools.utils import has_cuda_capability, has_rocm_capability

from rl.errors import require
from rl.host.cpu_speed import cpu_speed
from rl.host.listening import NO_LOOPBACK, has_loopback
from rl.host.platform import (
    GROUPED_ON,
    device_count,
    device_name,
    device_type,
    host_memory,
    hosts_of_job,
)
from rl.types.rules import above, at_least

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
    float32_tflops: float = 0.0
    """Dense float32 throughput; 0 for that of bfloat16."""


# Sources: NVIDIA's data sheets of A100 80GB SXM, H100 SXM, H200 SXM and HGX B200, with one 200
# (A100) or 400 Gb/s adapter for each; memory is what their drivers report. The CPU's figures are
# those of one common server core.
_H100 = Device(
    memory_gib=79,
    tflops=989,
    float8_tflops=1979,
    memory_gb_s=3350,
    link_gb_s=450,
    network_gb_s=50,
)
DEVICES: dict[DeviceName, Device] = {
    "cpu": Device(
        memory_gib=4, tflops=0.05, float8_tflops=0, memory_gb_s=10, link_gb_s=5, network_gb_s=1
    ),
    "a100": Device(
        memory_gib=79, tflops=312, float8_tflops=0, memory_gb_s=2039, link_gb_s=300, network_gb_s=25
    ),
    "h100": _H100,
    "h200": replace(_H100, memory_gib=139, memory_gb_s=4800),
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
    names: list[DeviceName] = [known for known in DEVICES if known in name.lower()]
    require(
        bool(names),
        f"hardware.device is 'auto', and nothing is known of this host's {name}; name the nearest "
        f"of {list(DEVICES)} and what it has else, such as hardware.memory_gib",
    )
    return names[0]


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
    """Memory of a device in GiB; 0 uses the data sheet's. On CPU it is a limit for each rank, and 0
    sets none below the host's memory."""

    tflops: Annotated[float, _FIGURE] = 0.0
    """Dense bfloat16 throughput of a device in TFLOP/s; on CPU, that of a thread in any dtype. 0
    uses the data sheet's, on CPU a measurement."""

    memory_gb_s: Annotated[float, _FIGURE] = 0.0
    """Memory bandwidth of a device in GB/s; on CPU, of a thread. 0 uses the data sheet's, on CPU a
    measurement."""

    link_gb_s: Annotated[float, _FIGURE] = 0.0
    """Bandwidth from a device to the others of its node, in GB/s in one direction. 0 uses the data
    sheet's."""

    network_gb_s: Annotated[float, _FIGURE] = 0.0
    """Bandwidth from a device to other nodes, in GB/s in one direction. 0 uses the data sheet's."""

    host_memory_gib: Annotated[float, _FIGURE] = 0.0
    """Memory of a node in GiB, for all its ranks. 0 for the least that a node of the Slurm job has;
    outside a job for that of the current host, or for 2048 if the host lacks the device."""

    training_efficiency: Annotated[float, above(0, 1)] = 0.4
    """Share of ``tflops`` that training on GPUs achieves while it does not wait for collectives. An
    assumption of ``rl.plan``, to be replaced by a measured value."""

    generation_efficiency: Annotated[float, above(0, 1)] = 0.6
    """Share of ``memory_gb_s`` that generation on GPUs achieves, an assumption as well."""

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
    def captures_experts(self) -> bool:
        """Whether CUDA graphs can capture experts in bfloat16 on the device, a GPU."""
        if self.device == "auto":
            return torch.cuda.get_device_capability()[0] in GROUPED_ON
        return self.device != "a100"

    @property
    def figures(self) -> Device:
        """Figures of the device: those given here, otherwise those of the data sheet. On a CPU host
        they are measured, for one thread.
        """
        if self.device != "auto":
            named = self.device
        else:
            named = _known(device_name()) if self.kind == "cuda" else "cpu"
        configured = {name: getattr(self, name) for name in FIGURES if getattr(self, name)}
        device = DEVICES[named]
        if named == "cpu" and device_type() == "cpu":
            speed = cpu_speed()
            device = replace(device, tflops=speed.bfloat16_tflops, memory_gb_s=speed.memory_gb_s)
            if not self.tflops:
                device = replace(device, float32_tflops=speed.float32_tflops)
        return replace(device, **configured)

    @property
    def peak_tflops(self) -> float:
        """Dense bfloat16 throughput of a device in TFLOP/s; 0 if it is unknown, as on CPU."""
        return self.tflops or (self.figures.tflops if self._is_known_gpu else 0.0)

    @property
    def memory_known(self) -> float:
        """Memory of a GPU in GiB; infinity if it is unknown."""
        return self.memory_gib or (self.figures.memory_gib if self._is_known_gpu else math.inf)

    @property
    def _is_known_gpu(self) -> bool:
        return self.kind == "cuda" and (
            self.device != "auto" or any(name in device_name().lower() for name in DEVICES)
        )

    @property
    def host_gib(self) -> float:
        """Memory of a node in GiB."""
        if self.host_memory_gib or self.assumes_host:
            return self.host_memory_gib or 2048.0
        return min([host["memory_gib"] for host in hosts_of_job()] or [host_memory() / 2**30])

    @property
    def assumes_host(self) -> bool:
        """Whether the memory of a node is neither given nor known."""
        return not self.host_memory_gib and not hosts_of_job() and self.kind != device_type()

    @property
    def gpus(self) -> int:
        """Number of GPUs per node; 0 on CPU."""
        return 0 if self.kind == "cpu" else self.gpus_per_node or device_count()
