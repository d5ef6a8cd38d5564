"""Gemma 3 of Google, the language model alone."""

from collections.abc import Mapping
from typing import Any

from rl.model.families.family import REWARD_CLASS, Family
from rl.model.hugging_face_config import HuggingFaceConfig

LAYER = "model.layers.{}"


class Gemma3(Family):
    """Family whose embeddings are scaled by the root of their width."""

    config_class = "Gemma3TextConfig"
    reward_class = f"Gemma3Text{REWARD_CLASS}"

    def random(self, sizes: Mapping[str, Any]) -> dict[str, Any]:
        return {**super().random(sizes), "embedding_scale": sizes["dim"] ** 0.5}

    def read(self, config: HuggingFaceConfig, max_seq_len: int) -> dict[str, Any]:
        fields = super().read(config, max_seq_len)
        own = {"attention_scale": config.size("query_pre_attn_scalar") ** -0.5}
        return fields | own | {"embedding_scale": fields["dim"] ** 0.5}

    def write(self, shape: Mapping[str, Any]) -> dict[str, Any]:
        scale = shape["attention_scale"]
        scalar = shape["head_dim"] if scale is None else round(scale**-2)
        return super().write(shape) | {"query_pre_attn_scalar": scalar}


FAMILY = Gemma3(
    model_type="gemma3_text",
    prefix="Gemma3",
    fixed={"normalized": "both", "norm_offset": True, "activation": "gelu_tanh"},
    options={"attention_bias": ("qkv_bias", "output_bias")},
    allowed={
        "hidden_act": (None, "gelu_pytorch_tanh"),
        "hidden_activation": ("gelu_pytorch_tanh",),
        "final_logit_softcapping": (None,),
        "attn_logit_softcapping": (None,),
        "use_bidirectional_attention": (False, None),
    },
    has_windows=True,
    two_ropes=True,
    tensors={
        "layers.{}.attention_post_norm.weight": f"{LAYER}.post_attention_layernorm.weight",
        "layers.{}.ffn_norm.weight": f"{LAYER}.pre_feedforward_layernorm.weight",
        "layers.{}.ffn_post_norm.weight": f"{LAYER}.post_feedforward_layernorm.weight",
    },
)
