"""oneDNN for the float32 matrix products of a trainer on CPU; MKL takes twice as long on AMD."""

import torch

from rl.compat.torch_internals import onednn_linear

_kernels: torch.library.Library | None = None  # keeps the kernels registered


def use_onednn() -> None:
    """Make oneDNN the CPU kernel of ``mm`` in this process, below autograd, DTensor and compiled
    code.
    """
    global _kernels
    if _kernels is None and torch.backends.mkldnn.is_available():
        _kernels = torch.library.Library("aten", "IMPL")
        _kernels.impl("mm", _mm, "CPU", allow_override=True)
        _kernels.impl("mm.out", _mm_out, "CPU", allow_override=True)


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if not (a.dtype == b.dtype == torch.float32 and a.numel() and b.numel()):
        return torch.addmm(a.new_zeros(()), a, b, beta=0)
    # oneDNN copies its left operand: pass the smaller matrix there
    if not a.is_contiguous() and b.numel() < a.numel():
        return onednn_linear(b.T, a).T
    return onednn_linear(a, b.T)


def _mm_out(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(_mm(a, b))
