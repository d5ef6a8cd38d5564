"""Layers with a gated delta net (arXiv:2412.06464) in place of attention, as in Qwen3.5."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchtitan.models.common import Linear
from torchtitan.models.common.attention import local_head_split
from torchtitan.models.common.nn_modules import Conv1d
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.protocols.module import Module

from rl.model.delta_rule import Heads, delta_net_of_documents
from rl.model.shape import ModelShape

NORMAL = {"weight": partial(nn.init.normal_, std=0.02)}


class DocumentDelta(Module):
    """Convolution and delta rule of documents that are packed in rows."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        heads: Heads

    def __init__(self, config: Config):
        super().__init__()
        self.heads = config.heads

    def forward(
        self,
        qkv_BLD: torch.Tensor,
        decay_BLN: torch.Tensor,
        beta_BLN: torch.Tensor,
        weight: torch.Tensor,
        *,  # torchtitan's local_map wants placements of the others
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Return the outputs [B, L, N, value_dim] of :func:`rl.model.delta_rule.delta_net`. A
        document starts at each 0 of ``positions`` [B, L].
        """
        rows, decay, beta = (tensor.flatten(0, 1) for tensor in (qkv_BLD, decay_BLN, beta_BLN))
        flat = positions.flatten()
        out = delta_net_of_documents(rows, decay, beta, weight, self.heads, flat)
        return out.unflatten(0, positions.shape)


class GatedNorm(Module):
    """Norm of each head times SiLU of its gate, in float32 at least."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        dim: int
        eps: float

    def __init__(self, config: Config):
        super().__init__()
        self.eps = config.eps
        self.weight = nn.Parameter(torch.empty(config.dim))

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return the normalized heads [..., dim] of ``x`` and ``gate`` [..., dim]."""
        wide = torch.promote_types(x.dtype, torch.float32)
        normed = F.rms_norm(x.to(wide), x.shape[-1:], None, self.eps).to(x.dtype)
        return ((self.weight * normed) * F.silu(gate.to(wide))).to(x.dtype)


class GatedDeltaNet(Module):
    """Mixer of tokens whose state has one size for all lengths."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        heads: Heads
        qkv: Linear.Config
        """Projection to the rows of ``heads``, so that whole heads can be divided among ranks."""
        z: Linear.Config
        """Projection to gates of the outputs."""
        a: Linear.Config
        """Projection to what decides the decay of each value head."""
        b: Linear.Config
        """Projection to the strength of updates of each value head."""
        conv: Conv1d.Config
        """Convolution of each column of ``qkv``."""
        wo: Linear.Config
        norm: GatedNorm.Config
        inner: Module.Config
        """Module of convolution and delta rule, such as DocumentDelta."""

    def __init__(self, config: Config):
        super().__init__()
        self.value_dim = config.heads.value_dim
        self.qkv = config.qkv.build()
        self.z = config.z.build()
        self.a = config.a.build()
        self.b = config.b.build()
        self.conv = config.conv.build()
        self.A_log = nn.Parameter(torch.empty(config.a.out_features))
        self.dt_bias = nn.Parameter(torch.empty(config.a.out_features))
        self.inner = config.inner.build()
        self.norm = config.norm.build()
        self.wo = config.wo.build()

    def forward(self, x_BLD: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """Return the outputs [B, L, D] of inputs [B, L, D]."""
        wide = torch.promote_types(x_BLD.dtype, torch.float32)
        step = F.softplus(self.a(x_BLD).to(wide) + self.dt_bias)
        decay = -self.A_log.to(wide).exp() * step
        rows = (self.qkv(x_BLD), decay, self.b(x_BLD).sigmoid(), self.conv.weight)
        out = self.inner(*rows, positions=positions)
        gate = local_head_split(self.z(x_BLD), self.value_dim)
        return self.wo(self.norm(out, gate).flatten(2))  # type: ignore[no-any-return]


class DeltaLayer(Qwen3TransformerBlock):
    """torchtitan's layer with a gated delta net in place of attention, which is None."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Qwen3TransformerBlock.Config):
        delta_net: GatedDeltaNet.Config

    def __init__(self, config: Config):
        fields: Any = {"attention": config.delta_net}  # which torchtitan builds
        super().__init__(dataclasses.replace(config, **fields))
        self.delta_net: GatedDeltaNet = self.attention  # type: ignore[has-type]
        self.attention = None

    def forward(
        self, x: torch.Tensor, attention_masks: Any, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the outputs [B, L, D] of inputs [B, L, D]."""
        x = x + self.delta_net(self.attention_norm(x), positions)
        part = self.moe if self.moe_enabled else self.feed_forward
        return x + part(self.ffn_norm(x))  # type: ignore[no-any-return]


def heads_of(shape: ModelShape) -> Heads:
    """Return the heads of the gated delta nets of ``shape``."""
    values = shape.delta_value_heads // shape.delta_key_heads
    return Heads(shape.delta_key_dim, shape.delta_value_dim, values)


def delta_net_config(shape: ModelShape, inner: Module.Config | None) -> GatedDeltaNet.Config:
    """Return the config of a gated delta net with ``inner``; None for DocumentDelta."""
    heads = heads_of(shape)
    dim = shape.dim
    values = shape.delta_value_heads * heads.value_dim
    rows = shape.delta_rows
    bound = shape.delta_kernel**-0.5
    conv = Conv1d.Config(
        in_channels=rows,
        out_channels=rows,
        groups=rows,
        kernel_size=shape.delta_kernel,
        bias=False,
        param_init={"weight": partial(nn.init.uniform_, a=-bound, b=bound)},
    )
    norm = {"weight": nn.init.ones_}
    return GatedDeltaNet.Config(
        heads=heads,
        qkv=linear(dim, rows),
        z=linear(dim, values),
        a=linear(dim, shape.delta_value_heads),
        b=linear(dim, shape.delta_value_heads),
        conv=conv,
        wo=linear(values, dim),
        norm=GatedNorm.Config(dim=heads.value_dim, eps=shape.norm_eps, param_init=norm),
        inner=inner or DocumentDelta.Config(heads=heads),
        param_init={"A_log": lambda A: nn.init.uniform_(A, 1, 16).log_(), "dt_bias": nn.init.ones_},
    )


def linear(columns: int, rows: int) -> Linear.Config:
    """Return the config of a projection with torchtitan's initializer of Qwen3."""
    return Linear.Config(in_features=columns, out_features=rows, param_init=NORMAL)


InnerDelta = Callable[[int], Module.Config]
"""Function from the index of a layer to the module of its convolution and delta rule."""
