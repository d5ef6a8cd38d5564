"""Flex attention on a fake device: torch compiles it, and Dynamo cannot run below a mode.

``use_stand_ins`` changes torch and torchtitan for the rest of the process.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor.experimental._context_parallel import _attention as context_parallel
from torch.nn.attention.flex_attention import AuxOutput, BlockMask
from torchtitan.models.common import attention

BLOCK = 128


def use_stand_ins() -> None:
    """Replace the compiled functions by ones that allocate what the compiled ones keep."""
    flex: Any = attention.FlexAttention
    flex._compiled_flex_attn = staticmethod(_attend)
    for module in (attention, context_parallel):
        vars(module)["_compiled_create_block_mask"] = _block_mask


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, _, lse = ctx.saved_tensors
        torch.empty_like(lse)  # sums of the gradient, which the kernel needs
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, block_mask: BlockMask, **_: Any
) -> Any:
    """Return empty results of attention. Raises RuntimeError for arguments that the kernel
    refuses.
    """
    devices = {str(tensor.device) for tensor in (q, k, v, block_mask.kv_indices)}
    dtypes = {tensor.dtype for tensor in (q, k, v)}
    if len(devices) > 1 or len(dtypes) > 1:
        raise RuntimeError(f"flex attention takes one device and one dtype: {devices}, {dtypes}")
    if tuple(block_mask.shape[-2:]) != (q.shape[-2], k.shape[-2]):
        raise RuntimeError(
            f"flex attention: a mask of {tuple(block_mask.shape)} for queries of {tuple(q.shape)} "
            f"and keys of {tuple(k.shape)}"
        )
    out, lse = _Attend.apply(q, k, v)
    return out, AuxOutput(lse=lse)


def _block_mask(
    mask_mod: Callable[..., torch.Tensor],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: Any = "cuda",
    **_: Any,
) -> BlockMask:
    """Return a mask in which every block is partly masked. ``mask_mod`` is called for one
    pair."""
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    mask_mod(zero, zero, zero, zero)
    rows, columns = -(-Q_LEN // BLOCK), -(-KV_LEN // BLOCK)
    counts = torch.full((B or 1, H or 1, rows), columns, dtype=torch.int32, device=device)
    indices = torch.arange(columns, dtype=torch.int32, device=device)
    indices = indices.expand(B or 1, H or 1, rows, columns).contiguous()
    lengths = (Q_LEN, KV_LEN)
    return BlockMask.from_kv_blocks(
        counts, indices, BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=lengths
    )
