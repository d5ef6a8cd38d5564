"""A family in a module of one's own: Seed-OSS, whose projections all have a bias."""

from dataclasses import replace

from rl.model.families import seed_oss

BIASES = dict.fromkeys(("qkv_bias", "output_bias", "feed_forward_bias"), True)
FAMILY = replace(seed_oss.FAMILY, fixed={"qk_norm": False, **BIASES})
