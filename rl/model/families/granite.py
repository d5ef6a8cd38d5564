"""Granite 3 of IBM without experts, which scales embeddings, attention, residuals and logits."""

from collections.abc import Mapping
from typing import Any

from rl.model.families.family import Family
from rl.model.hugging_face_config import HuggingFaceConfig

SCALES = {
    "embedding_scale": "embedding_multiplier",
    "attention_scale": "attention_multiplier",
    "residual_scale": "residual_multiplier",
    "logits_scale": "logits_scaling",
}
"""Keys of config.json, by field of ModelShape."""


class Granite(Family):
    """Family with four numbers above 0."""

    def read(self, config: HuggingFaceConfig, max_seq_len: int) -> dict[str, Any]:
        fields = super().read(config, max_seq_len)
        return fields | {name: float(config.number(key)) for name, key in SCALES.items()}

    def write(self, shape: Mapping[str, Any]) -> dict[str, Any]:
        return super().write(shape) | {key: shape[name] for name, key in SCALES.items()}


FAMILY = Granite(
    model_type="granite",
    prefix="Granite",
    fixed={
        "qk_norm": False,
        "embedding_scale": 12.0,
        "attention_scale": 0.015625,
        "residual_scale": 0.22,
        "logits_scale": 8.0,
    },
    options={"attention_bias": ("qkv_bias", "output_bias"), "mlp_bias": ("feed_forward_bias",)},
    has_reward_class=False,
)
