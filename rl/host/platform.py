"""Device and host of this process.

Importing this module sets torchtitan's device, also in modules that are already imported.
``rl.model``, ``rl.training`` and ``rl.generation`` import it first, and call ``import_attention``.
"""

import ctypes
import json
import logging
import mmap
import os
import resource
import socket
from pathlib import Path
from typing import Any, Literal

import torch
import torchtitan.tools.utils as titan

from rl.compat.titan import import_attention_without_compilers, tell_device
from rl.host.disk import boot

_libc = ctypes.CDLL(None, use_errno=True)

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables that torch's allocator of GPU memory reads, the later name first."""
HEAP = {
    "MALLOC_ARENA_MAX": (-8, 1),
    "MALLOC_MMAP_THRESHOLD_": (-3, 2**30),
    "MALLOC_TRIM_THRESHOLD_": (-1, 2**30),
}
"""Variables of glibc's heap, each with its number in mallopt(3) and the value with which a process
keeps the memory that it frees, until ``trim_heap``: the kernel clears each new page."""
PRIMITIVES = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
KEPT = 2**29
"""Bytes of freed memory that the heap keeps for the next step. More than that is fragments, which
tensors of other sizes do not fill."""
_trimmed_to = 0  # resident bytes after the last trim
GROUPED_ON = (9, 10)
"""Major compute capabilities of the GPUs that keep the offsets of grouped products in bfloat16 on
the device. Elsewhere torch reads the offsets on the host."""


def import_attention() -> None:
    """Import torchtitan's attention, without compilers on hosts without CUDA, where nothing that it
    compiles is called.
    """
    if device_type() == "cpu":
        import_attention_without_compilers()


def device_type() -> str:
    """Return the device of trainers and generators on this host: ``"cuda"`` or ``"cpu"``."""
    return titan.device_type


def thread_variables(threads: int | Literal["auto"]) -> dict[str, str]:
    """Return the variables to launch a process with that computes with ``threads`` CPU threads;
    ``auto``, which a session settles, is 1 outside of sessions.
    """
    count = 1 if threads == "auto" else threads
    variables = {"OMP_NUM_THREADS": str(count)}
    if count > 1:
        variables["OMP_WAIT_POLICY"] = "PASSIVE"  # idle threads would take the cores of others
        variables["GOMP_SPINCOUNT"] = "300000"  # a thread that sleeps between two products is late
    return variables


def allocator_variables() -> dict[str, str]:
    """Return the variables to launch a trainer's rank with, without those that the environment has.

    - Memory on a GPU grows in place, so that fragments of one size serve tensors of another.
    - On CPU the process keeps memory that it frees: see HEAP.
    - On CPU oneDNN keeps 64 products of bfloat16 and the memory of each. By default it keeps 1,024,
      one for each number of tokens, which is about 0.8 GiB.
    """
    variables = {}
    if not any(name in os.environ for name in ALLOCATOR):
        variables[ALLOCATOR[0]] = "expandable_segments:True"
    if device_type() == "cpu":
        defaults = {name: str(value) for name, (_, value) in HEAP.items()} | {PRIMITIVES: "64"}
        variables |= {name: value for name, value in defaults.items() if name not in os.environ}
    return variables


def set_heap() -> None:
    """Do what glibc does with the variables of HEAP at the start of a program. Call this in a
    process that was forked, before it has threads.
    """
    for name, (number, _) in HEAP.items():
        if name in os.environ:
            _libc.mallopt(number, int(os.environ[name]))


def bind_to_device() -> None:
    """Keep this thread of a rank, and those that it starts, on the cores beside the rank's GPU.
    Does nothing without CUDA. No test runs CUDA.
    """
    if device_type() == "cuda":
        gpu: Any = torch.cuda.get_device_properties(int(os.environ["LOCAL_RANK"]))
        bind_to(f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0")


def bind_to(device: str, devices: Path = Path("/sys/bus/pci/devices")) -> None:
    """Keep this thread, and those that it starts, on the cores beside the PCI device at address
    ``device``. Does nothing if the host does not say which cores these are, or allows none of them.
    """
    cores = devices / device / "local_cpulist"
    near = set[int]()
    for span in filter(None, cores.read_text().strip().split(",") if cores.exists() else []):
        first, _, last = span.partition("-")
        near.update(range(int(first), int(last or first) + 1))
    if allowed := near & os.sched_getaffinity(0):
        os.sched_setaffinity(0, allowed)


def device_count() -> int:
    """Return the number of GPUs of this host; 0 without CUDA."""
    return torch.cuda.device_count()


def device_name() -> str:
    """Return the driver's name of the first GPU of this host."""
    return torch.cuda.get_device_name(0)


def peak_memory() -> int:
    """Return the peak memory of this process in bytes: reserved memory on its GPU, or resident
    memory without CUDA.
    """
    if device_type() == "cuda":
        return torch.cuda.max_memory_reserved()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def release_cached_memory() -> None:
    """Give the device back the memory that torch, or on CPU the heap, keeps for later tensors, so
    that other processes can have it.
    """
    if device_type() == "cuda":
        torch.cuda.empty_cache()
    else:
        _libc.malloc_trim(0)


def resident_memory() -> int:
    """Return the resident memory of this process on its host, in bytes."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * mmap.PAGESIZE


def trim_heap() -> None:
    """Give the host back the memory that the heap keeps, if this process has grown by more than
    KEPT since the last time. Does nothing with CUDA.
    """
    global _trimmed_to
    if device_type() == "cpu" and resident_memory() - _trimmed_to > KEPT:
        _libc.malloc_trim(0)
        _trimmed_to = resident_memory()


def discard(memory: torch.UntypedStorage) -> None:
    """Give the host back the whole pages of ``memory``, which is on CPU. Their addresses stay; they
    are zeros when they are next used.
    """
    assert memory.device.type == "cpu", "the memory of a GPU is given back by its allocator"
    begin = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (memory.data_ptr() + memory.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE - begin
    pages = ctypes.c_void_p(begin), ctypes.c_size_t(max(size, 0))
    if _libc.madvise(*pages, mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "madvise: the host takes no pages back")


def has_rdma() -> bool:
    """Whether this host has an RDMA device."""
    devices = Path("/sys/class/infiniband")
    return devices.is_dir() and any(devices.iterdir())


def core_count() -> int:
    """Return the number of cores that this process may use within its container's quota."""
    cores = len(os.sched_getaffinity(0))
    limit = Path("/sys/fs/cgroup/cpu.max")
    quota, _, period = (limit.read_text() if limit.exists() else "max").partition(" ")
    return cores if quota.strip() == "max" else max(1, min(cores, int(quota) // int(period)))


def host_memory() -> int:
    """Return the memory of this host in bytes, or of its container if that has less."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    most = limit.read_text().strip() if limit.exists() else "max"
    return whole if most == "max" else min(whole, int(most))


def hosts_of_job() -> list[dict[str, Any]]:
    """Return what the workers of this job that have started say of their hosts, such as
    ``memory_gib``: see rl/launch/node.py. Empty outside a job.
    """
    logs = os.environ.get("TILLER_LOGS")
    files = Path(logs, "workers").glob("[!.]*.json") if logs else []
    return [json.loads(file.read_text()) for file in files]


def memory_domain() -> str:
    """Return a name that is equal for processes that can map each other's memory: one boot of one
    host, one PID namespace.
    """
    return f"{socket.gethostname()}/{boot()[:8]}/{os.stat('/proc/self/ns/pid').st_ino}"


if not torch.cuda.is_available():  # torchtitan assumes CUDA
    tell_device("cpu", torch.cpu)
for name in ("torchao", "torch.utils._pytree"):
    # importing torchao warns of CUDA libraries, wanted or not
    logging.getLogger(name).setLevel(logging.ERROR)
