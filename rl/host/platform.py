"""Device and host of this process.

Importing this module sets torchtitan's device, also in modules that are already imported.
``rl.model``, ``rl.training`` and ``rl.generation`` import it first, and call ``import_attention``.
"""

import logging
import os
import resource
import socket
from pathlib import Path

import torch
import torchtitan.tools.utils as titan

from rl.compat.titan import import_attention_without_compilers, tell_device


def select_device() -> None:
    """Set torchtitan's device to the CPU on hosts without CUDA, where torchtitan assumes CUDA."""
    if not torch.cuda.is_available():
        tell_device("cpu", torch.cpu)


def import_attention() -> None:
    """Import torchtitan's attention, without compilers on hosts without CUDA, where nothing that it
    compiles is called.
    """
    if device_type() == "cpu":
        import_attention_without_compilers()


def device_type() -> str:
    """Return the device of trainers and generators on this host: ``"cuda"`` or ``"cpu"``."""
    return titan.device_type


def thread_variables(threads: int) -> dict[str, str]:
    """Return the variables to launch a process with that computes with ``threads`` CPU threads."""
    variables = {"OMP_NUM_THREADS": str(threads)}
    if threads > 1:
        variables["OMP_WAIT_POLICY"] = "PASSIVE"  # idle threads would take the cores of others
        variables["GOMP_SPINCOUNT"] = "300000"  # a thread that sleeps between two products is late
    return variables


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
    """Give the device back the memory that torch keeps for later tensors, so that other processes
    can have it. Does nothing without CUDA.
    """
    if device_type() == "cuda":
        torch.cuda.empty_cache()


def has_rdma() -> bool:
    """Whether this host has an RDMA device."""
    devices = Path("/sys/class/infiniband")
    return devices.is_dir() and any(devices.iterdir())


def memory_domain() -> str:
    """Return a name that is equal for processes that can map each other's memory: one boot of one
    host, one PID namespace.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}/{boot[:8]}/{os.stat('/proc/self/ns/pid').st_ino}"


select_device()
for name in ("torchao", "torch.utils._pytree"):
    # importing torchao warns of CUDA libraries, wanted or not
    logging.getLogger(name).setLevel(logging.ERROR)
