"""Where this process computes: its device and its host.

To import this module tells torchtitan the device, also the modules of it that were imported before.
``rl.model``, ``rl.training`` and ``rl.generation`` import it first.
"""

import logging
import os
import socket
from pathlib import Path

import torch
import torchtitan.tools.utils as titan

from rl.compat.titan import tell_device


def select_device() -> None:
    """Point torchtitan at the CPU on hosts without CUDA: it assumes CUDA there."""
    if not torch.cuda.is_available():
        tell_device("cpu", torch.cpu)


def device_type() -> str:
    """``"cuda"`` or ``"cpu"``: what trainers and generators of this host run on."""
    return titan.device_type


def device_count() -> int:
    """GPUs of this host; 0 without CUDA."""
    return torch.cuda.device_count()


def device_name() -> str:
    """What the driver of this host's first GPU calls it."""
    return torch.cuda.get_device_name(0)


def memory_domain() -> str:
    """Equal for processes that can map each other's memory: one boot of one host, one PID
    namespace.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()}/{boot[:8]}/{os.stat('/proc/self/ns/pid').st_ino}"


select_device()
for name in ("torchao", "torch.utils._pytree"):
    # importing torchao warns of CUDA libraries, wanted or not
    logging.getLogger(name).setLevel(logging.ERROR)
