"""Context parallelism: each rank runs a part of every row and gathers the outputs of whole rows."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed.context_parallel.api import cp_shard

from rl.types.sampling_mask import SamplingMask


class SequenceShard:
    """Split of rows [B, L] over a context-parallel mesh; ``balancer`` names the assignment of cells
    to ranks.

    All ranks compute the same loss of whole rows. Each rank keeps only the gradient of its own
    cells, so that the sum over ranks counts every cell once.
    """

    def __init__(self, mesh: DeviceMesh, balancer: str | None):
        self._mesh = mesh
        self._balancer = balancer
        self._group = mesh.get_group()

    def shard(self, *rows: torch.Tensor, masks: Any) -> tuple[list[torch.Tensor], Any]:
        """Return this rank's cells of ``rows`` [B, L], and the attention masks of its queries.

        ``masks`` is a BlockMask or bool [B, 1, L, L], or {window: mask}. For a bool mask, the
        result is [B, 1, L / ranks, L] and has all keys, in the order in which attention gathers
        them.
        """
        first = next(iter(masks.values())) if isinstance(masks, dict) else masks
        dense = isinstance(first, torch.Tensor)
        order = torch.arange(rows[0].shape[1], device=rows[0].device).expand_as(rows[0])
        (*mine, places), block_masks = cp_shard(
            self._mesh, (*rows, order), None if dense else masks, self._balancer
        )
        self._own = places
        self._all = _all_gather(places.contiguous(), self._group)
        if not dense:
            return mine, block_masks
        if isinstance(masks, dict):
            return mine, {window: self._queries(mask) for window, mask in masks.items()}
        return mine, self._queries(masks)

    def _queries(self, mask: torch.Tensor) -> torch.Tensor:
        queries = mask.squeeze(1).take_along_dim(self._own.unsqueeze(2), dim=1)
        return queries.take_along_dim(self._all.unsqueeze(1), dim=2).unsqueeze(1)

    def select(self, mask: SamplingMask) -> SamplingMask:
        """Return the part of ``mask``, which has B * L cells, for this rank's cells."""
        at = self._own.cpu()
        width = at.shape[1] * dist.get_world_size(self._group)
        return mask.select((at + torch.arange(len(at)).unsqueeze(1) * width).flatten().numpy())

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of all cells, [B, L] or [B, L, K], from the ranks' parts of L / ranks
        columns.
        """
        return _Gather.apply(values, self._own, self._all, self._group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, places: torch.Tensor, order: torch.Tensor, group: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(places)
        gathered = _all_gather(values.contiguous(), group)
        return torch.empty_like(gathered).index_put_((_rows(order), order), gathered)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (places,) = ctx.saved_tensors
        return grad[_rows(places), places], None, None, None


def _rows(columns: torch.Tensor) -> torch.Tensor:
    """Return the row of each cell of ``columns`` [B, L], [B, 1]."""
    return torch.arange(len(columns), device=columns.device).unsqueeze(1)


def _all_gather(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, values, group)
    return torch.cat(parts, dim=1)
