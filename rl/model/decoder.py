"""torchtitan's canonical decoder with the sizes and options of a ModelShape; trainer and generator
share it.
"""

import dataclasses
from collections.abc import Mapping
from itertools import groupby
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torchtitan.models.common import CosSinRoPE, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.moe import GroupedExperts, MoE
from torchtitan.models.qwen3 import Qwen3Model

from rl.compat import titan
from rl.model.shape import ModelShape

T = TypeVar("T")


class Experts(GroupedExperts):
    """torchtitan's grouped experts in bfloat16 on CUDA; elsewhere one plain product per expert, in
    the precision of the input.

    It is a subclass with the parameters of GroupedExperts, so that torchtitan shards and wraps it.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """Return the experts' outputs [R, D] for tokens [R, D], which are sorted by expert.

        ``num_tokens_per_expert_E``, int64 [E], has the number of tokens of each expert of this
        rank.
        """
        if x_RD.is_cuda and x_RD.dtype == torch.bfloat16:
            return super().forward(x_RD, num_tokens_per_expert_E)
        weights = (
            w.to_local() if isinstance(w, DTensor) else w
            for w in (self.w1_EFD, self.w3_EFD, self.w2_EDF)
        )
        # The backward pass of torch._grouped_mm on CPU refuses many shapes and strides.
        tokens = x_RD.split(num_tokens_per_expert_E.tolist())
        experts = zip(tokens, *(w.unbind() for w in weights), strict=True)
        return torch.cat([(F.silu(x @ w1.T) * (x @ w3.T)) @ w2.T for x, w1, w3, w2 in experts])


class RotaryEmbedding(CosSinRoPE):
    """torchtitan's rotary embedding with transformers' scalings, or one that rotates nothing."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        parameters: tuple[tuple[str, Any], ...] = ()
        """Items of transformers' parameters of a scaled embedding."""
        rotates: bool = True

    config: Config

    def _precompute_cache(self) -> torch.Tensor:
        """Return cosines and sines, float32 [max_seq_len, 2 * dim]."""
        config = self.config
        if config.rotates and not config.parameters:
            return super()._precompute_cache()
        frequencies, factor = torch.zeros(config.dim // 2), 1.0
        if config.rotates:
            frequencies, factor = _scaled_frequencies(config)
        angles = torch.outer(torch.arange(config.max_seq_len).float(), frequencies).repeat(1, 2)
        return torch.cat([angles.cos() * factor, angles.sin() * factor], dim=-1)


def _scaled_frequencies(config: RotaryEmbedding.Config) -> tuple[torch.Tensor, float]:
    """Return transformers' frequencies, float32 [dim / 2], and the factor of cosines and sines."""
    from transformers import PreTrainedConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_theta": config.theta, **dict(config.parameters)}
    described = PreTrainedConfig(
        rope_parameters=parameters,
        head_dim=config.dim,
        hidden_size=config.dim,
        num_attention_heads=1,
        max_position_embeddings=config.max_seq_len,
    )
    return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](described, None)


def decoder_config(shape: ModelShape, *, fuse_qkv: bool, inner_attention: Any) -> Qwen3Model.Config:
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
        "rope": RotaryEmbedding.Config(
            dim=shape.head_dim,
            max_seq_len=shape.max_seq_len,
            theta=shape.rope_theta,
            parameters=shape.rope_scaling,
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
        layer.attention.rope.rotates = index not in shape.layers_without_rope
        _set_options(layer, shape)
        if layer.moe is not None:
            layer.moe = _with_tiller_experts(layer.moe)
    config = titan.qwen3_config(
        layers, vocab_size=shape.vocab_size, dim=shape.dim, tie_embeddings=shape.tie_embeddings
    )
    for _, norm, _, _ in config.traverse(RMSNorm.Config):
        norm.eps = shape.norm_eps
    return config


def _set_options(layer: Any, shape: ModelShape) -> None:
    """Give the config of a layer the norms and biases of ``shape``."""
    attention = layer.attention
    if not shape.qk_norm:
        attention.qk_norm = None
    biases = [(attention.qkv_linear, shape.qkv_bias), (attention.wo, shape.output_bias)]
    if layer.feed_forward is not None:
        biases.append((layer.feed_forward, shape.feed_forward_bias))
    for part, has_bias in biases:
        for _, linear, _, _ in part.traverse(Linear.Config):
            linear.bias = has_bias


def parameter_shapes(shape: ModelShape, *, fuse_qkv: bool) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters by torchtitan's names. A tied parameter has one entry.

    Allocates no memory.
    """
    one_layer = dataclasses.replace(shape, n_layers=1)
    attention = ScaledDotProductAttention.Config()
    config = decoder_config(one_layer, fuse_qkv=fuse_qkv, inner_attention=attention)
    with torch.device("meta"):
        model = config.build()
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return in_all_layers(shapes, shape.n_layers)


def in_all_layers(of_one: Mapping[str, T], layers: int) -> dict[str, T]:
    """Return values by parameter name for all layers of a model, from those of its first layer."""
    prefix = "layers.0."
    result = {}
    for is_layer, names in groupby(of_one, lambda name: name.startswith(prefix)):
        group = [*names]
        for layer in range(layers if is_layer else 1):
            for name in group:
                result[name.replace(prefix, f"layers.{layer}.", 1)] = of_one[name]
    return result


def _with_tiller_experts(moe: MoE.Config) -> MoE.Config:
    """Return ``moe`` with Tiller's experts and without a balancing bias, which would change the
    policy outside of the gradient.
    """
    experts = moe.routed_experts.inner_experts
    fields = {field.name: getattr(experts, field.name) for field in dataclasses.fields(experts)}
    routed = dataclasses.replace(moe.routed_experts, inner_experts=Experts.Config(**fields))
    return dataclasses.replace(moe, load_balance_coeff=None, routed_experts=routed)
