"""Ministral 8B, a Mistral whose layers may differ in their attention windows."""

from rl.model.families.family import Family

FAMILY = Family(
    model_type="ministral",
    prefix="Ministral",
    other_names=("MistralForCausalLM",),
    fixed={"qk_norm": False, "norm_eps": 1e-5},
    has_windows=True,
)
