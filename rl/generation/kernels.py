"""vLLM's kernels inside torchtitan's modules, whose parameters keep their names, shapes and places.

Results agree with torchtitan's own to rounding. CUDA calls the same norm and rotary embedding, as
kernels of its own; no test covers these.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchtitan.models.common import CosSinRoPE, FeedForward, Linear, RMSNorm
from torchtitan.models.qwen3 import Qwen3Model

from rl.compat.vllm_kernels import PackedWeight, rms_norm, rotary_embedding

JOINED = ("w1", "w3")
"""Layers of a feed-forward that are multiplied in one product, and packed as one."""


class KernelRMSNorm(RMSNorm):
    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        rms_norm(out, x, self.weight, self.eps)
        return out


class KernelRoPE(CosSinRoPE):
    """Rotates in float32, whatever the dtype of queries and keys."""

    cache: torch.Tensor

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        pass

    def halve_cache(self) -> None:
        """Keep cosines, then sines, of a position's angles [max_seq_len, dim]: torchtitan has each
        of them twice.
        """
        half = self.config.dim // 2
        self.cache = self.cache[:, half:-half].contiguous()

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of queries and keys [1, T, heads, dim]; overwrites them where they are float32."""
        assert positions is not None
        q = query.float()
        k = key.float()
        tokens = positions.shape[-1]
        rotary_embedding(
            positions.view(-1),
            q.view(tokens, -1),
            k.view(tokens, -1),
            q.shape[-1],
            self.cache,
            True,
        )
        return q.type_as(query), k.type_as(key)


class PackedLinear(Linear):
    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def __init__(self, config: Config):
        super().__init__(config)
        self.packed = PackedWeight()

    def pack(self) -> None:
        self.packed.fill(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.packed(x)  # type: ignore[no-any-return]


class PackedFeedForward(FeedForward):
    """Computes w1 and w3 in one product."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        pass

    def __init__(self, config: Config):
        super().__init__(config)
        self.packed = PackedWeight()

    def pack(self) -> None:
        self.packed.fill(torch.cat([self.w1.weight, self.w3.weight]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.packed(x).chunk(2, dim=-1)
        return self.w2(F.silu(gate) * up)


FUSED: dict[Any, Any] = {RMSNorm: KernelRMSNorm, CosSinRoPE: KernelRoPE}
PACKED: dict[Any, Any] = {Linear: PackedLinear, FeedForward: PackedFeedForward}


def use_kernels(config: Qwen3Model.Config, *, compiled: bool, packed: bool) -> None:
    """Build what the tables name in place of torchtitan's: FUSED unless a compiler will fuse,
    PACKED where asked.
    """
    for module, ours in {**({} if compiled else FUSED), **(PACKED if packed else {})}.items():
        for _, old, parent, place in config.traverse(module.Config):
            if place not in JOINED:
                setattr(
                    parent,
                    place,
                    ours.Config(**{field.name: getattr(old, field.name) for field in fields(old)}),
                )


def pack(model: nn.Module) -> None:
    """Bring packed copies up to date: to be called after each change of the parameters."""
    for module in model.modules():
        if isinstance(module, PackedLinear | PackedFeedForward):
            module.pack()


def unpack(model: nn.Module) -> None:
    """Free the packed copies; nothing can be computed until ``pack``."""
    for module in model.modules():
        if isinstance(module, PackedWeight):
            module.empty()
