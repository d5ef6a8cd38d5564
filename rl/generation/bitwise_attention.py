"""vLLM's attention backend for CPU with the sums of :func:`rl.model.parity.attend`, which the
trainer has too.
"""

from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
)

from rl.model.parity import Group, Stretch, attend, groups_of


class BitwiseAttention(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return _Attention


class _Attention(CPUAttentionBackendImpl):
    """Attention over a cache in which each slot has the keys of all heads, then their values."""

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        count = len(slot_mapping)
        for slots, new in zip(_slots(kv_cache), (key, value), strict=True):
            slots[slot_mapping] = new[:count]

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        **_: Any,
    ) -> torch.Tensor:
        """Write the attention output of ``query`` [T, N, H] to ``output``, and return it."""
        if attn_metadata is None:  # vLLM warms up
            return output
        count = attn_metadata.num_actual_tokens
        groups = _groups(attn_metadata, kv_cache.shape[2], max(0, self.sliding_window))
        keys, values = _slots(kv_cache)
        result = attend(query[:count], keys, values, groups, scale=self.scale, sinks=self.sinks)
        output[:count] = result[0].view_as(output[:count])
        return output


def _slots(kv_cache: torch.Tensor) -> torch.Tensor:
    """Return keys and values [2, slots, N_kv, H] of a cache [blocks, N_kv, slots, 2 * H]."""
    _, heads, _, width = kv_cache.shape
    return kv_cache.view(2, -1, heads, width // 2)


def _groups(metadata: CPUAttentionMetadata, block: int, window: int) -> list[Group]:
    """Return the groups of the queries of a step; its layers with the same window share them."""
    known = metadata.__dict__.setdefault("groups_by_window", {})
    if window not in known:
        ends = metadata.query_start_loc.tolist()
        stretches = []
        for request, length in enumerate(metadata.seq_lens.tolist()):
            blocks = metadata.block_table[request, : -(-length // block)].numpy()
            slots = blocks[:, None].astype(np.int64) * block + np.arange(block)
            queries = np.arange(ends[request], ends[request + 1])
            stretches.append(Stretch(queries, slots.ravel()[:length]))
        known[window] = groups_of(stretches, window)
    return known[window]  # type: ignore[no-any-return]
