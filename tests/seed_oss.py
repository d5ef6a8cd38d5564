"""A family in a module of one's own: Seed-OSS, whose projections all have a bias with random
weights.
"""

from rl.model.families.family import Family

FAMILY = Family(
    model_type="seed_oss",
    prefix="SeedOss",
    fixed={"qk_norm": False, "qkv_bias": True, "output_bias": True, "feed_forward_bias": True},
    options={
        "attention_bias": ("qkv_bias",),
        "attention_out_bias": ("output_bias",),
        "mlp_bias": ("feed_forward_bias",),
    },
    head_dim=128,
    allowed={"residual_dropout": (0.0,)},
)
