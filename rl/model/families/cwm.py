"""Code World Model of Meta, a Llama with attention windows in some layers."""

from typing import Any

from rl.model.families.family import Family
from rl.model.hugging_face_config import HuggingFaceConfig


class CodeWorldModel(Family):
    """Family whose rotary embedding is scaled if config.json has no parameters of it."""

    def read(self, config: HuggingFaceConfig, max_seq_len: int) -> dict[str, Any]:
        config.config_class = self.config_class
        config.default_rope()
        return super().read(config, max_seq_len)


FAMILY = CodeWorldModel(
    model_type="cwm",
    prefix="Cwm",
    fixed={"qk_norm": False, "norm_eps": 1e-5},
    options={"mlp_bias": ("feed_forward_bias",)},
    head_dim=128,
    has_reward_class=False,
    has_windows=True,
)
