"""Context parallelism: each rank runs a part of every row, and knows the outputs of all of it."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed.context_parallel.api import cp_shard


class SequenceShard:
    """Which cells of rows [B, L] this rank of a context-parallel mesh runs, as ``balancer`` deals
    them.

    All ranks compute the loss of whole rows alike; each keeps the gradient of its own cells only,
    so that the sum over ranks counts every cell once.
    """

    def __init__(self, mesh: DeviceMesh, balancer: str | None):
        self._mesh = mesh
        self._balancer = balancer
        self._group = mesh.get_group()

    def shard(self, *rows: torch.Tensor, masks: Any) -> tuple[list[torch.Tensor], Any]:
        """This rank's cells of ``rows`` [B, L], and its queries' part of the attention masks.

        ``masks`` are a BlockMask, or bool [B, 1, L, L]: those keep all keys, in the order in which
        attention gathers them.
        """
        dense = isinstance(masks, torch.Tensor)
        order = torch.arange(rows[0].shape[1], device=rows[0].device).expand_as(rows[0])
        (*mine, own), block_masks = cp_shard(
            self._mesh, (*rows, order), None if dense else masks, self._balancer
        )
        self._own = own
        self._all = _all_gather(own.contiguous(), self._group)
        if not dense:
            return mine, block_masks
        queries = masks.squeeze(1).take_along_dim(own.unsqueeze(2), dim=1)
        return mine, queries.take_along_dim(self._all.unsqueeze(1), dim=2).unsqueeze(1)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Values of all cells [B, L], from this rank's [B, L / ranks] and the others'."""
        return _Gather.apply(values, self._own, self._all, self._group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, own: torch.Tensor, order: torch.Tensor, group: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(own)
        gathered = _all_gather(values.contiguous(), group)
        return torch.empty_like(gathered).scatter_(1, order, gathered)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (own,) = ctx.saved_tensors
        return grad.gather(1, own), None, None, None


def _all_gather(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, values, group)
    return torch.cat(parts, dim=1)
