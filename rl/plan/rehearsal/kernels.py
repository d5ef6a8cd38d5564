"""Arguments that CUDA kernels or NCCL refuse, and meta kernels accept."""

from collections.abc import Iterable
from typing import Any

import torch

PRODUCTS = ("aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default")
INDEXED = (
    "aten.index.Tensor",
    "aten.index_put.default",
    "aten.index_put_.default",
    "aten._index_put_impl_.default",
)
JOINED = ("aten.cat.default", "aten.stack.default")
KEYS_AND_VALUES = "cplib."
"""Operators that gather or reduce keys and values together."""
COLLECTIVES = (
    "c10d.",
    "_c10d_functional.",
    "_c10d_functional_autograd.",
    "_dtensor.",
    KEYS_AND_VALUES,
)


def moves(name: str) -> bool:
    """Return whether operator ``name`` is a collective."""
    local = "wait_tensor" in name or "_wrap_tensor" in name
    return name.startswith(COLLECTIVES) and not local


def require_what_kernels_take(name: str, args: tuple) -> None:
    """Raise RuntimeError if the kernel of operator ``name`` would refuse ``args`` on CUDA."""
    if name in PRODUCTS:
        dtypes = [tensor.dtype for tensor in _tensors(args)]
        if len(set(dtypes)) > 1:
            raise RuntimeError(f"{name}: a product takes one dtype; it got {dtypes}")
    of_host = name in INDEXED and args[0].device.type == "cpu"
    if of_host and any(index.device.type == "cuda" for index in _tensors(args[1])):
        raise RuntimeError(f"{name}: a tensor of the host cannot be indexed by the device's")
    if name in JOINED:
        devices = [tensor.device for tensor in args[0]]
        if len(set(devices)) > 1:
            raise RuntimeError(f"{name}: the tensors must be on one device; they are on {devices}")


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor)]
