"""Hunyuan of Tencent without experts, which normalizes queries and keys after the rotation."""

from typing import Any

from rl.model.families.family import Family
from rl.model.hugging_face_config import HuggingFaceConfig

ATTENTION = "model.layers.{}.self_attn"


class Hunyuan(Family):
    """Family whose dynamic rotary embedding has an ``alpha``, which changes its base."""

    def read(self, config: HuggingFaceConfig, max_seq_len: int) -> dict[str, Any]:
        fields = super().read(config, max_seq_len)
        rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if rope.get("rope_type", rope.get("type")) == "dynamic" and rope.get("alpha"):
            dim = fields["head_dim"]
            alpha = config.number("alpha of the rotary embedding", rope["alpha"])
            fields["rope_theta"] *= alpha ** (dim / (dim - 2))
        return fields


FAMILY = Hunyuan(
    model_type="hunyuan_v1_dense",
    prefix="HunYuanDenseV1",
    fixed={"norm_after_rope": True, "norm_eps": 1e-5},
    options={"attention_bias": ("qkv_bias", "output_bias")},
    tensors={
        "layers.{}.attention.q_norm.weight": f"{ATTENTION}.query_layernorm.weight",
        "layers.{}.attention.k_norm.weight": f"{ATTENTION}.key_layernorm.weight",
    },
)
