"""ERNIE 4.5 of Baidu without experts."""

from rl.model.families.family import Family

FAMILY = Family(
    model_type="ernie4_5",
    prefix="Ernie4_5",
    fixed={"qk_norm": False, "norm_eps": 1e-5, "rope_interleaved": True},
    options={"use_bias": ("qkv_bias", "output_bias", "feed_forward_bias")},
    head_dim=128,
    has_reward_class=False,
)
