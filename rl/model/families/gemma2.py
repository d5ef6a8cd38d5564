"""Gemma 2 of Google, and what all Gemmas share."""

from collections.abc import Mapping
from typing import Any

from rl.model.families.family import Family
from rl.model.hugging_face_config import NEAR, HuggingFaceConfig, layer_types

LAYER = "model.layers.{}"
CAPS = {"attention_cap": "attn_logit_softcapping", "logits_cap": "final_logit_softcapping"}
FIXED = {"normalized": "both", "norm_offset": True, "activation": "gelu_tanh"}
ALLOWED = {
    "hidden_act": (None, "gelu_pytorch_tanh"),
    "hidden_activation": ("gelu_pytorch_tanh",),
    "use_bidirectional_attention": (None, False),
}
TENSORS = {
    "layers.{}.attention_post_norm.weight": f"{LAYER}.post_attention_layernorm.weight",
    "layers.{}.ffn_norm.weight": f"{LAYER}.pre_feedforward_layernorm.weight",
    "layers.{}.ffn_post_norm.weight": f"{LAYER}.post_feedforward_layernorm.weight",
}


class Gemma(Family):
    """Family whose embeddings are scaled by the root of their width, and that may bound logits."""

    def random(self, sizes: Mapping[str, Any]) -> dict[str, Any]:
        return {**super().random(sizes), "embedding_scale": sizes["dim"] ** 0.5}

    def read(self, config: HuggingFaceConfig, max_seq_len: int) -> dict[str, Any]:
        fields = super().read(config, max_seq_len)
        config.size("sliding_window")  # transformers needs it even if no layer does
        extra = {"attention_scale": config.size("query_pre_attn_scalar") ** -0.5}
        for name, key in CAPS.items():
            extra[name] = 0.0 if config[key] is None else float(config.number(key))
        return fields | extra | {"embedding_scale": fields["dim"] ** 0.5}

    def write(self, shape: Mapping[str, Any]) -> dict[str, Any]:
        scale = shape["attention_scale"]
        scalar = shape["head_dim"] if scale is None else round(scale**-2)
        caps = {key: shape[name] or None for name, key in CAPS.items()}
        written = super().write(shape) | {"query_pre_attn_scalar": scalar} | caps
        if written["sliding_window"] is None:  # transformers needs it even if no layer does
            kinds = layer_types(shape["n_layers"], NEAR, ())
            written |= {"sliding_window": shape["max_seq_len"], "layer_types": kinds}
        return written


FAMILY = Gemma(
    model_type="gemma2",
    prefix="Gemma2",
    fixed=FIXED | {"qk_norm": False, "attention_cap": 50.0, "logits_cap": 30.0},
    options={"attention_bias": ("qkv_bias", "output_bias")},
    allowed=ALLOWED,
    has_windows=True,
    tensors=TENSORS,
)
