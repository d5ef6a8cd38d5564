"""Llama 2, 3, 3.1 to 3.3, and models of their architecture."""

from rl.model.families.family import Family

FAMILY = Family(
    model_type="llama",
    prefix="Llama",
    fixed={"qk_norm": False, "norm_eps": 1e-5},
    options={"attention_bias": ("qkv_bias", "output_bias"), "mlp_bias": ("feed_forward_bias",)},
)
