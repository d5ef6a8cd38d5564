"""torchtitan's canonical decoder with the sizes and options of a ModelShape; trainer and generator
share it.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn
from torchtitan.models.common import (
    Embedding,
    FeedForward,
    Linear,
    RMSNorm,
    SigmoidGatedFeedForward,
)
from torchtitan.models.common.attention import GQAttention, ScaledDotProductAttention
from torchtitan.models.common.moe import MoE
from torchtitan.models.qwen3 import Qwen3Model
from torchtitan.models.qwen3.model import Qwen3TransformerBlock

from rl.compat import titan
from rl.model.delta_net import DeltaLayer, InnerDelta, delta_net_config, linear
from rl.model.experts import ClampedExperts, Experts
from rl.model.rotary import RotaryEmbedding
from rl.model.router import Router
from rl.model.shape import ModelShape
from rl.model.shards import local_of

T = TypeVar("T")

gelu = partial(F.gelu, approximate="tanh")

POST_NORMS = ("attention_post_norm", "ffn_post_norm")
"""Norms of outputs of a layer that normalizes inputs too."""


class Attention(GQAttention):
    """torchtitan's attention with the options of other families.

    With ``sinks`` the heads can attend to nothing: each has a logit without a value
    (arXiv:2309.17453), which the inner attention gets as ``sinks``, [heads of this rank]. If it is
    ``gated``, ``qkv_linear`` has twice the heads of queries: after each the gate of its output.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):
        sinks: bool = False
        scale: float | None = None
        """Factor of the products of queries and keys; None is head_dim ** -0.5."""
        norm_after_rope: bool = False
        wide_norms: bool = False
        """Whether the norms of queries and keys span all heads."""
        gated: bool = False

    def __init__(self, config: Config):
        super().__init__(config)
        self.norm_after_rope = config.norm_after_rope
        self.gated = config.gated
        if config.scale is not None:
            self.scaling = config.scale
        if config.wide_norms:
            fields = _fields(config.qk_norm)
            widths = (heads * self.head_dim for heads in (self.n_heads, self.n_kv_heads))
            # adapters freeze the norm that these replace
            learns = self.q_norm.weight.requires_grad  # type: ignore[has-type]
            self.q_norm, self.k_norm = (
                WideNorm.Config(**fields | {"normalized_shape": width})
                .build()
                .requires_grad_(learns)
                for width in widths
            )
        if config.sinks:
            self.sinks = nn.Parameter(torch.empty(config.n_heads))
            self.inner_attention.register_forward_pre_hook(self._add_sinks, with_kwargs=True)

    def forward(
        self, x_BLD: torch.Tensor, attention_masks: Any, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the outputs [B, L, D] of inputs [B, L, D]."""
        if not (self.norm_after_rope or self.gated):
            return super().forward(x_BLD, attention_masks, positions)
        q_BLNH, k_BLNH, v_BLNH = self.qkv_linear(x_BLD)
        gate_BLNH = None
        if self.gated:  # a slice of every second head would gather the heads of all ranks
            q_BLNH, gate_BLNH = q_BLNH.unflatten(2, (-1, 2)).unbind(3)
        if self.norm_after_rope:
            q_BLNH, k_BLNH = self.rope(q_BLNH, k_BLNH, positions)
        if self.q_norm is not None:
            q_BLNH, k_BLNH = self.q_norm(q_BLNH), self.k_norm(k_BLNH)  # type: ignore[misc]
        if not self.norm_after_rope:
            q_BLNH, k_BLNH = self.rope(q_BLNH, k_BLNH, positions)
        options = {"scale": self.scaling, "enable_gqa": self.enable_gqa}
        heads = (q_BLNH, k_BLNH, v_BLNH)
        out_BLNH = self.inner_attention(*heads, attention_masks=attention_masks, **options)
        if gate_BLNH is not None:
            out_BLNH = out_BLNH * gate_BLNH.sigmoid()
        return self.wo(out_BLNH.contiguous().flatten(2))  # type: ignore[no-any-return]

    def _add_sinks(self, _module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "sinks": local_of(self.sinks)}


class WideNorm(RMSNorm):
    """Norm of all heads of queries or keys together."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalized heads [B, L, N, H] of heads [B, L, N, H]."""
        return super().forward(x.flatten(2)).view(x.shape)


class OffsetNorm(RMSNorm):
    """Norm that multiplies by 1 + weight, in float32 at least."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalized ``x`` [..., D]."""
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = self.weight.to(wide) + 1.0
        return F.rms_norm(x.to(wide), self.normalized_shape, weight, self.eps).type_as(x)


class ActivatedFeedForward(FeedForward):
    """Feed-forward whose gate has another activation than SiLU."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        activation: Callable[[torch.Tensor], torch.Tensor]

    def __init__(self, config: Config):
        super().__init__(config)
        self.activation = config.activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs [..., D] of inputs [..., D]."""
        return self.w2(self.activation(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class Layer(Qwen3TransformerBlock):
    """torchtitan's layer that scales what it adds, and normalizes outputs too or alone."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Qwen3TransformerBlock.Config):
        scale: float
        """Factor of the outputs of attention and feed-forward."""
        outputs_alone: bool
        attention_post_norm: RMSNorm.Config | None = None
        """Norm of outputs, in addition to that of inputs."""
        ffn_post_norm: RMSNorm.Config | None = None

    def __init__(self, config: Config):
        super().__init__(config)
        self.scale = config.scale
        self.outputs_alone = config.outputs_alone
        for name in POST_NORMS:
            norm = getattr(config, name)
            setattr(self, name, norm and norm.build())

    def forward(
        self, x: torch.Tensor, attention_masks: Any, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the outputs [B, L, D] of inputs [B, L, D]."""
        norms = (self.attention_norm, self.attention_post_norm)
        x = x + self._output(norms, self.attention, x, attention_masks, positions)
        part = self.moe if self.moe_enabled else self.feed_forward
        return x + self._output((self.ffn_norm, self.ffn_post_norm), part, x)

    def _output(self, norms: Any, part: nn.Module, x: torch.Tensor, *rest: Any) -> Any:
        norm, post_norm = norms
        out = norm(part(x, *rest)) if self.outputs_alone else part(norm(x), *rest)
        return (post_norm(out) if post_norm is not None else out) * self.scale


class ScaledEmbedding(Embedding):
    """Embedding whose vectors are multiplied by ``scale``."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Embedding.Config):
        scale: float

    def __init__(self, config: Config):
        super().__init__(config)
        self.scale = config.scale

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return vectors [..., D] of token ids [...]."""
        return super().forward(input) * self.scale


def decoder_config(
    shape: ModelShape,
    *,
    fuse_qkv: bool,
    inner_attention: Any,
    inner_delta: InnerDelta | None = None,
) -> Qwen3Model.Config:
    """Return the model config of ``shape``; its layers attend through ``inner_attention``.

    ``inner_attention`` is a torchtitan module config, or a function from layer index to one.
    ``inner_delta`` makes the modules of the delta rule; None for those of documents.
    """
    sizes: dict[str, Any] = {
        "n_layers": shape.n_layers,
        "dim": shape.dim,
        "n_heads": shape.n_heads * (2 if shape.attention_gate else 1),
        "n_kv_heads": shape.n_kv_heads,
        "head_dim": shape.head_dim,
        "fuse_qkv": fuse_qkv,
        "attn_backend": "flex",
        "rope": RotaryEmbedding.Config(
            dim=int(shape.head_dim * shape.rope_share),
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
        layer.attention.rope.interleaved = shape.rope_interleaved
        if index in shape.layers_with_local_rope:
            layer.attention.rope.theta = shape.local_rope_theta
            layer.attention.rope.parameters = ()
        if layer.moe is not None:
            layer.moe = _with_tiller_experts(layer.moe, shape)
        _set_options(layer, shape)
        if index in shape.layers_with_delta_rule:
            net = delta_net_config(shape, inner_delta and inner_delta(index))
            layers[index] = DeltaLayer.Config(
                **_fields(layer) | {"attention": None, "delta_net": net}
            )
        if shape.residual_scale != 1.0 or shape.normalized != "inputs":
            more = {"scale": shape.residual_scale, "outputs_alone": shape.normalized == "outputs"}
            if shape.normalized == "both":
                more |= {name: dataclasses.replace(layer.ffn_norm) for name in POST_NORMS}
            layers[index] = Layer.Config(**_fields(layer) | more)
    config = titan.qwen3_config(
        layers, vocab_size=shape.vocab_size, dim=shape.dim, tie_embeddings=shape.tie_embeddings
    )
    if shape.embedding_scale != 1.0:
        embedding = _fields(config.tok_embeddings) | {"scale": shape.embedding_scale}
        config.tok_embeddings = ScaledEmbedding.Config(**embedding)
    for _, norm, parent, name in [*config.traverse(RMSNorm.Config)]:
        norm.eps = shape.norm_eps
        if shape.norm_offset:
            drawn = {"weight": nn.init.zeros_}
            setattr(parent, name, OffsetNorm.Config(**_fields(norm) | {"param_init": drawn}))
    return config


def _set_options(layer: Any, shape: ModelShape) -> None:
    """Give the config of a layer the norms, biases and sinks of ``shape``."""
    attention = layer.attention
    if not shape.qk_norm:
        attention.qk_norm = None
    attention.n_heads = shape.n_heads
    attention.wo.in_features = shape.n_heads * shape.head_dim
    biases = [(attention.qkv_linear, shape.qkv_bias), (attention.wo, shape.output_bias)]
    if layer.moe is None:
        if shape.activation == "gelu_tanh":
            fields = _fields(layer.feed_forward)
            layer.feed_forward = ActivatedFeedForward.Config(**fields, activation=gelu)
        biases.append((layer.feed_forward, shape.feed_forward_bias))
    else:
        biases.append((layer.moe.router.gate, shape.router_bias))
    for part, has_bias in biases:
        for _, projection, _, _ in part.traverse(Linear.Config):
            projection.bias = has_bias
    options = {
        "sinks": shape.sinks,
        "scale": shape.attention_scale,
        "norm_after_rope": shape.norm_after_rope,
        "wide_norms": shape.wide_qk_norm,
        "gated": shape.attention_gate,
    }
    if any(options.values()):
        drawn = {"sinks": partial(nn.init.normal_, std=0.02)} if shape.sinks else None
        layer.attention = Attention.Config(**_fields(attention) | options | {"param_init": drawn})


def float32_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return hidden @ weight.T, float32 [T, V], of ``hidden`` [T, D] and ``weight`` [V, D] of any
    dtype. On CPU it copies both in float32. Tests do not cover CUDA.
    """
    if hidden.is_cuda and hidden.dtype != torch.float32:
        mm: Any = torch.mm  # its stub lacks out_dtype
        return mm(hidden, weight.T, out_dtype=torch.float32)  # type: ignore[no-any-return]
    return hidden.float() @ weight.float().T


def parameter_shapes(shape: ModelShape, *, fuse_qkv: bool) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters by torchtitan's names. A tied parameter has one entry.

    Allocates no memory.
    """
    attention = ScaledDotProductAttention.Config()
    config = decoder_config(shape.shortened(), fuse_qkv=fuse_qkv, inner_attention=attention)
    with torch.device("meta"):
        model = config.build()
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return in_all_layers(shapes, shape.kinds)


def in_all_layers(of_some: Mapping[str, T], kinds: Sequence[int]) -> dict[str, T]:
    """Return values by parameter name for all layers of a model. A layer has the values of the
    layer that ``kinds`` has in its place.
    """
    result: dict[str, T] = {}
    for is_layer, group in groupby(of_some, lambda name: name.startswith("layers.")):
        names = [*group]
        if not is_layer:
            result |= {name: of_some[name] for name in names}
            continue
        for layer, kind in enumerate(kinds):
            prefix = f"layers.{kind}."
            its = (name for name in names if name.startswith(prefix))
            result |= {name.replace(prefix, f"layers.{layer}.", 1): of_some[name] for name in its}
    return result


def _with_tiller_experts(moe: MoE.Config, shape: ModelShape) -> MoE.Config:
    """Return ``moe`` with Tiller's experts and router. The router has the balancing bias, if any,
    as a parameter: it is part of the policy.
    """
    fields = _fields(moe.routed_experts.inner_experts)
    if shape.swiglu is None:
        experts: Any = Experts.Config(**fields)
    else:
        draw = fields["param_init"]
        drawn = dict.fromkeys(("gate_up_EDG", "gate_up_bias"), draw["w1_EFD"])
        drawn |= dict.fromkeys(("down_EFD", "down_bias"), draw["w2_EDF"])
        slope, bound = shape.swiglu
        changes = {"param_init": drawn, "slope": slope, "bound": bound}
        experts = ClampedExperts.Config(**fields | changes)
    routed = dataclasses.replace(moe.routed_experts, inner_experts=experts)
    own_fields = {"has_bias": shape.expert_bias, "param_init": {"expert_bias": nn.init.zeros_}}
    own_fields["route_norm"] = shape.route_norm
    router = Router.Config(**_fields(moe.router) | own_fields)
    moe = dataclasses.replace(moe, load_balance_coeff=None, routed_experts=routed, router=router)
    if (width := shape.shared_expert_dim) > 0:
        up, down = linear(shape.dim, width), linear(width, shape.dim)
        parts = {"w1": up, "w3": dataclasses.replace(up), "w2": down, "gate": linear(shape.dim, 1)}
        moe.shared_experts = SigmoidGatedFeedForward.Config(**parts)
    return moe


def _fields(config: Any) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
