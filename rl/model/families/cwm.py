"""Code World Model of Meta, a Llama with attention windows in some layers."""

from rl.model.families.family import Family

FAMILY = Family(
    model_type="cwm",
    prefix="Cwm",
    fixed={"qk_norm": False, "norm_eps": 1e-5},
    options={"mlp_bias": ("feed_forward_bias",)},
    head_dim=128,
    has_reward_class=False,
    has_windows=True,
)
