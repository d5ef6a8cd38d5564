"""vLLM's kernels, as functions and as a module."""

from typing import Any

import torch
from torch import nn
from vllm import _custom_ops

from rl.compat.torch_internals import onednn_multiplies

KEPT_SHAPES = 32
"""Number of token counts whose compiled product is cached; vLLM's own value."""

rms_norm = _custom_ops.rms_norm
rotary_embedding = _custom_ops.rotary_embedding


def can_pack(dtype: torch.dtype) -> bool:
    """Return whether this build of vLLM packs weights of ``dtype``, and this CPU multiplies them.
    torch itself lays out a weight of bfloat16 anew for each product.
    """
    return onednn_multiplies(dtype) and hasattr(torch.ops._C, "create_onednn_mm_handler")


class PackedWeight(nn.Module):
    """A copy of a weight [out, in] that oneDNN has laid out for its products, on CPU."""

    address: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.handler: Any = None
        # a tensor: compiled code would treat a number as a constant
        self.register_buffer(
            "address", torch.zeros((), dtype=torch.int64, device="cpu"), persistent=False
        )

    def fill(self, weight: torch.Tensor) -> None:
        self.handler = _custom_ops.create_onednn_mm(weight.t(), KEPT_SHAPES)
        self.address.copy_(self.handler.handler_tensor)

    def empty(self) -> None:
        self.handler = None

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = x.new_empty(*x.shape[:-1], self.handler.n)
        torch.ops._C.onednn_mm(out, x.reshape(-1, self.handler.k), bias, self.address)
        return out
