"""GLM-4 of Zhipu AI (0414) without experts, which rotates half of each head."""

from rl.model.families.family import Family

LAYER = "model.layers.{}"

FAMILY = Family(
    model_type="glm4",
    prefix="Glm4",
    fixed={
        "qk_norm": False,
        "qkv_bias": True,
        "normalized": "both",
        "norm_eps": 1.5625e-7,
        "rope_interleaved": True,
        "rope_share": 0.5,
    },
    options={"attention_bias": ("qkv_bias",)},
    head_dim=128,
    rope_share=0.5,
    tensors={
        "layers.{}.attention_post_norm.weight": f"{LAYER}.post_self_attn_layernorm.weight",
        "layers.{}.ffn_post_norm.weight": f"{LAYER}.post_mlp_layernorm.weight",
    },
    joined={"gate_up_proj": ("gate_proj", "up_proj")},
)
