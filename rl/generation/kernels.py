"""torchtitan's modules with vLLM's kernels. Parameters keep their names, shapes and modules.

Results agree with torchtitan's own to rounding. On CUDA, which no test covers, vLLM has its own
kernels for norm and rotary embedding.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchtitan.models.common import FeedForward, Linear, RMSNorm
from torchtitan.models.qwen3 import Qwen3Model

from rl.compat.vllm_kernels import PackedWeight, rms_norm, rotary_embedding
from rl.model.decoder import ActivatedFeedForward
from rl.model.rotary import RotaryEmbedding

JOINED = ("w1", "w3")
"""Layers of a feed-forward that are packed together and multiplied in one product."""


class KernelRMSNorm(RMSNorm):
    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        rms_norm(out, x, self.weight, self.eps)
        return out


class KernelRoPE(RotaryEmbedding):
    """Rotary embedding in float32, whatever the dtype of queries and keys."""

    cache: torch.Tensor
    """Each cosine and each sine once, [max_seq_len, dim]."""

    @dataclass(kw_only=True, slots=True)
    class Config(RotaryEmbedding.Config):
        pass

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate queries and keys [1, T, heads, dim]; float32 ones are overwritten."""
        assert positions is not None
        q = query.float()
        k = key.float()
        flat = positions.view(-1)
        rows = (q.view(len(flat), -1), k.view(len(flat), -1))
        rotary_embedding(flat, *rows, q.shape[-1], self.cache, not self.config.interleaved)
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
        return self.packed(x, self.bias)  # type: ignore[no-any-return]


class PackedFeedForward(FeedForward):
    """Feed-forward that computes w1 and w3 in one product."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        activation: Any = F.silu

    def __init__(self, config: Config):
        super().__init__(config)
        self.activation = config.activation
        self.packed = PackedWeight()

    def pack(self) -> None:
        self.packed.fill(torch.cat([self.w1.weight, self.w3.weight]))
        biases = [self.w1.bias, self.w3.bias]
        self.bias = None if None in biases else torch.cat(biases)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.packed(x, self.bias).chunk(2, dim=-1)
        return self.w2(self.activation(gate) * up)


FUSED: dict[Any, Any] = {RMSNorm: KernelRMSNorm, RotaryEmbedding: KernelRoPE}
PACKED: dict[Any, Any] = {
    Linear: PackedLinear,
    FeedForward: PackedFeedForward,
    ActivatedFeedForward: PackedFeedForward,
}


def use_kernels(
    config: Qwen3Model.Config, *, compiled: bool, packed: bool, joined: bool = True
) -> None:
    """Replace torchtitan's modules in ``config`` by those of FUSED unless ``compiled``, and by
    those of PACKED if ``packed``. ``joined``: whether w1 and w3 may be one layer.
    """
    together = JOINED if joined else ()
    for module, ours in {**({} if compiled else FUSED), **(PACKED if packed else {})}.items():
        if ours is PackedFeedForward and not joined:
            continue
        for _, old, parent, name in config.traverse(module.Config):
            if name not in together and type(old) is module.Config:  # a subclass computes otherwise
                values = {field.name: getattr(old, field.name) for field in fields(old)}
                setattr(parent, name, ours.Config(**values))


def pack(model: nn.Module) -> None:
    """Update the packed copies. Call this after each change of the parameters."""
    for module in model.modules():
        if isinstance(module, PackedLinear | PackedFeedForward):
            module.pack()


def unpack(model: nn.Module) -> None:
    """Free the packed copies. The model cannot run until ``pack``."""
    for module in model.modules():
        if isinstance(module, PackedWeight):
            module.empty()
