"""Qwen2, Qwen2.5 and the distillations of DeepSeek-R1 into them."""

from rl.model.families.family import Family

FAMILY = Family(
    model_type="qwen2",
    prefix="Qwen2",
    fixed={"qk_norm": False, "qkv_bias": True},
    allowed={"use_sliding_window": (False, True)},
    has_windows=True,
)
