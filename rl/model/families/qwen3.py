"""Qwen3 without experts."""

from rl.model.families.family import Family

FAMILY = Family(
    model_type="qwen3",
    prefix="Qwen3",
    options={"attention_bias": ("qkv_bias", "output_bias")},
    allowed={"use_sliding_window": (False, True)},
    head_dim=128,
    has_windows=True,
)
