"""Helium of Kyutai."""

from rl.model.families.family import Family

FAMILY = Family(
    model_type="helium",
    prefix="Helium",
    fixed={"qk_norm": False, "norm_eps": 1e-8, "rope_interleaved": True},
    options={"attention_bias": ("qkv_bias",), "mlp_bias": ("feed_forward_bias",)},
    head_dim=128,
)
