"""Kernel of a trainer's float32 matrix products on CPU: MKL, which is torch's own, or oneDNN."""

from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from rl.compat.torch_internals import onednn_linear

Kernel = Literal["mkl", "onednn"]

_registered: torch.library.Library | None = None  # keeps oneDNN's kernels registered


def use_kernel(kernel: Kernel) -> None:
    """Make ``kernel`` the CPU kernel of ``mm`` in this process, below autograd, DTensor and
    compiled code.
    """
    global _registered
    if kernel == kernel_in_use() or not torch.backends.mkldnn.is_available():
        return
    _registered = None
    if kernel == "onednn":
        _registered = torch.library.Library("aten", "IMPL")
        _registered.impl("mm", _onednn, "CPU", allow_override=True)
        _registered.impl(
            "mm.out", lambda a, b, *, out: out.copy_(_onednn(a, b)), "CPU", allow_override=True
        )


def kernel_in_use() -> Kernel:
    """Return the kernel of float32 products in this process."""
    return "mkl" if _registered is None else "onednn"


def faster_kernel() -> Kernel:
    """Return the faster kernel on the first rank's CPU, on every rank."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    chosen = [_faster_on(cpuinfo, torch.backends.cpu.get_cpu_capability())]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(chosen)
    return chosen[0]


def _faster_on(cpuinfo: str, capability: str) -> Kernel:
    """Return the faster kernel on the CPU that ``cpuinfo`` describes. ``capability`` names the
    instructions that torch uses there.

    The time of MKL over that of oneDNN is about 0.9 on Intel, 2 on AMD with AVX2, and 1.1 on AMD
    with AVX-512.
    """
    return "onednn" if "AuthenticAMD" in cpuinfo and capability == "AVX2" else "mkl"


def _onednn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if not (a.dtype == b.dtype == torch.float32 and a.numel() and b.numel()):
        return torch.addmm(a.new_zeros(()), a, b, beta=0)
    # oneDNN copies its left operand: pass the smaller matrix there
    if not a.is_contiguous() and b.numel() < a.numel():
        return onednn_linear(b.T, a).T
    return onednn_linear(a, b.T)
