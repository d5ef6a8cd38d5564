"""Qwen3.5 with experts, the language model alone. All tokens also go through a gated expert."""

from collections.abc import Mapping
from typing import Any

from rl.model.families.family import EXPERT_SIZES
from rl.model.families.qwen3_5_text import COMMON, TENSORS, Qwen35
from rl.model.hugging_face_config import HuggingFaceConfig

SHARED = "layers.{}.moe.shared_experts"
THEIRS = "model.layers.{}.mlp"


class Qwen35Moe(Qwen35):
    """Family that has no feed-forward layers beside experts."""

    def random(self, sizes: Mapping[str, Any]) -> dict[str, Any]:
        return super().random(sizes) | {"shared_expert_dim": sizes["moe_hidden_dim"]}

    def read(self, config: HuggingFaceConfig, max_seq_len: int) -> dict[str, Any]:
        config["intermediate_size"] = config["moe_intermediate_size"]
        return super().read(config, max_seq_len)

    def write(self, shape: Mapping[str, Any]) -> dict[str, Any]:
        written = super().write(shape)
        del written["intermediate_size"]
        return written


FAMILY = Qwen35Moe(
    model_type="qwen3_5_moe_text",
    prefix="Qwen3_5Moe",
    other_names=("Qwen3_5MoeTextModel", "Qwen3_5MoeForConditionalGeneration"),
    expert_sizes=EXPERT_SIZES | {"shared_expert_dim": "shared_expert_intermediate_size"},
    has_reward_class=False,
    tensors={
        **TENSORS,
        f"{SHARED}.w1.weight": f"{THEIRS}.shared_expert.gate_proj.weight",
        f"{SHARED}.w2.weight": f"{THEIRS}.shared_expert.down_proj.weight",
        f"{SHARED}.w3.weight": f"{THEIRS}.shared_expert.up_proj.weight",
        f"{SHARED}.gate.weight": f"{THEIRS}.shared_expert_gate.weight",
    },
    stacked={
        "mlp.experts.gate_up_proj": ("gate_proj", "up_proj"),
        "mlp.experts.down_proj": ("down_proj",),
    },
    **COMMON,
)
