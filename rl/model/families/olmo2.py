"""OLMo 2 of Ai2, which normalizes outputs, and queries and keys over all heads."""

from rl.model.families.family import OUTPUT_NORMS, Family

FAMILY = Family(
    model_type="olmo2",
    prefix="Olmo2",
    fixed={"wide_qk_norm": True, "normalized": "outputs", "norm_eps": 1e-5},
    options={"attention_bias": ("qkv_bias", "output_bias")},
    tensors=OUTPUT_NORMS,
)
