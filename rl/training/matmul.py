"""Kernel of a trainer's float32 matrix products on CPU: MKL, which is torch's own, or oneDNN."""

import torch

from rl.compat.torch_internals import onednn_linear
from rl.host.cpu_speed import Kernel

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


def _onednn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if not (a.dtype == b.dtype == torch.float32 and a.numel() and b.numel()):
        return torch.addmm(a.new_zeros(()), a, b, beta=0)
    # oneDNN copies its left operand: pass the smaller matrix there
    if not a.is_contiguous() and b.numel() < a.numel():
        return onednn_linear(b.T, a).T
    return onednn_linear(a, b.T)
