"""Which device this process computes on, told to torchtitan before it looks for itself."""

import torch
import torchtitan.tools.utils as titan


def select_device() -> None:
    """Point torchtitan at the CPU on hosts without CUDA: it assumes CUDA there."""
    if not torch.cuda.is_available():
        titan.device_type, titan.device_module = "cpu", torch.cpu


def device_type() -> str:
    """``"cuda"`` or ``"cpu"``: what trainers and generators of this host run on."""
    return titan.device_type


def device_count() -> int:
    """GPUs of this host; 0 without CUDA."""
    return torch.cuda.device_count()
