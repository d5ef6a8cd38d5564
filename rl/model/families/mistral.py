"""Mistral 7B, Nemo and Small, without vision."""

from rl.model.families.family import Family

FAMILY = Family(
    model_type="mistral",
    prefix="Mistral",
    fixed={"qk_norm": False, "norm_eps": 1e-5},
    has_windows=True,
)
