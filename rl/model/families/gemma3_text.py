"""Gemma 3 of Google, the language model alone."""

from rl.model.families.family import REWARD_CLASS
from rl.model.families.gemma2 import ALLOWED, CAPS, FIXED, TENSORS, Gemma


class Gemma3(Gemma):
    """Family whose classes of transformers have names of their own."""

    config_class = "Gemma3TextConfig"
    reward_class = f"Gemma3Text{REWARD_CLASS}"


FAMILY = Gemma3(
    model_type="gemma3_text",
    prefix="Gemma3",
    fixed=FIXED,
    options={"attention_bias": ("qkv_bias", "output_bias")},
    allowed=ALLOWED | dict.fromkeys(CAPS.values(), (None,)),
    has_windows=True,
    two_ropes=True,
    tensors=TENSORS,
)
