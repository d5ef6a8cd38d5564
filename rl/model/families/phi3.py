"""Phi-3 and Phi-4-mini of Microsoft, which join projections in one tensor."""

from collections.abc import Mapping
from typing import Any

from rl.model.families.family import Family
from rl.model.hugging_face_config import HuggingFaceConfig

LENGTH = "original_max_position_embeddings"


class Phi3(Family):
    """Family with longrope, whose frequencies depend on whether a sequence is longer than LENGTH.
    Tiller computes those of shorter sequences.
    """

    def read(self, config: HuggingFaceConfig, max_seq_len: int) -> dict[str, Any]:
        place = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        rope = section if isinstance(section := config.get(place), dict) else {}
        # transformers reads su and yarn as longrope
        kinds = ("default", "longrope", "su", "yarn")
        kind = rope.get("rope_type", rope.get("type", "default"))
        config.one_of(f"rope_type of {place}", kinds, kind)
        if kind != "default":
            config[place] = rope | {"rope_type": "default"}
        fields = super().read(config, max_seq_len)
        scaling = () if kind == "default" else self._longrope(config, rope, fields)
        return fields | {"rope_scaling": scaling}

    def write(self, shape: Mapping[str, Any]) -> dict[str, Any]:
        length = dict(shape["rope_scaling"]).get(LENGTH, shape["max_seq_len"])
        return super().write(shape) | {LENGTH: length}

    def _longrope(
        self, config: HuggingFaceConfig, rope: Mapping[str, Any], fields: Mapping[str, Any]
    ) -> tuple[tuple[str, Any], ...]:
        length, longest = config.size(LENGTH), config.size("max_position_embeddings")
        allowed = "longer sequences rotate in another way; set model.max_seq_len to it or less"
        config.require(fields["max_seq_len"] <= length, LENGTH, length, allowed)
        factor = config.number("factor", rope.get("factor") or longest / length)
        items: dict[str, Any] = {"rope_type": "longrope", LENGTH: length, "factor": factor}
        config.one_of("attention_factor", (None,), rope.get("attention_factor"))
        count = int(fields["head_dim"] * fields["rope_share"]) // 2
        for key in ("short_factor", "long_factor"):
            values = rope.get(key)
            holds = isinstance(values, list) and len(values) == count
            config.require(holds, key, values, f"it must be a list of {count} numbers above 0")
            items[key] = [config.number(key, value) for value in values or ()]
        return tuple(items.items())


FAMILY = Phi3(
    model_type="phi3",
    prefix="Phi3",
    fixed={"qk_norm": False, "norm_eps": 1e-5},
    allowed={"resid_pdrop": (0.0, 0), "embd_pdrop": (0.0, 0)},
    rope_share=1.0,
    has_windows=True,
    joined={
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    },
)
