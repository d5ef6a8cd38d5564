"""torchtitan's canonical Qwen3 in the sizes of a ModelShape; trainer and generator share it."""

import dataclasses
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torchtitan.models.common import CosSinRoPE
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.moe import MoE
from torchtitan.models.qwen3 import Qwen3Model

from rl.compat import titan
from rl.model.experts import Experts
from rl.model.shape import ModelShape


def qwen3_config(shape: ModelShape, *, fuse_qkv: bool, inner_attention: Any) -> Qwen3Model.Config:
    """Return the model config of ``shape``; its layers attend through ``inner_attention``.

    ``inner_attention`` is a torchtitan module config, or a function from layer index to one.
    """
    sizes: dict[str, Any] = {
        "n_layers": shape.n_layers,
        "dim": shape.dim,
        "n_heads": shape.n_heads,
        "n_kv_heads": shape.n_kv_heads,
        "head_dim": shape.head_dim,
        "fuse_qkv": fuse_qkv,
        "attn_backend": "flex",
        "rope": CosSinRoPE.Config(
            dim=shape.head_dim, max_seq_len=shape.max_seq_len, theta=shape.rope_theta
        ),
    }
    if shape.num_experts:
        sizes |= {
            "moe_hidden_dim": shape.moe_hidden_dim,
            "num_experts": shape.num_experts,
            "top_k": shape.experts_per_token,
            "moe_comm_backend": "standard",
        }
    else:
        sizes["hidden_dim"] = shape.hidden_dim
    layers = titan.qwen3_layers(**sizes)
    for index, layer in enumerate(layers):
        attention = inner_attention(index) if callable(inner_attention) else inner_attention
        layer.attention = dataclasses.replace(layer.attention, inner_attention=attention)
        if layer.moe is not None:
            layer.moe = _with_tiller_experts(layer.moe)
    return titan.qwen3_config(
        layers, vocab_size=shape.vocab_size, dim=shape.dim, tie_embeddings=shape.tie_embeddings
    )


@lru_cache(8)
def parameter_shapes(shape: ModelShape, *, fuse_qkv: bool) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of all parameters by torchtitan's names. A tied parameter has one entry.

    Allocates no memory.
    """
    attention = ScaledDotProductAttention.Config()
    config = qwen3_config(shape, fuse_qkv=fuse_qkv, inner_attention=attention)
    with torch.device("meta"):
        model = config.build()
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _with_tiller_experts(moe: MoE.Config) -> MoE.Config:
    """Return ``moe`` with Tiller's experts and without a balancing bias, which would change the
    policy outside of the gradient.
    """
    experts = moe.routed_experts.inner_experts
    fields = {field.name: getattr(experts, field.name) for field in dataclasses.fields(experts)}
    routed = dataclasses.replace(moe.routed_experts, inner_experts=Experts.Config(**fields))
    return dataclasses.replace(moe, load_balance_coeff=None, routed_experts=routed)
