"""SmolLM3, of which every fourth layer does not rotate queries and keys."""

from collections.abc import Mapping
from typing import Any

from rl.model.families.family import Family
from rl.model.hugging_face_config import HuggingFaceConfig


class SmolLM3(Family):
    """Family with ``no_rope_layers``: a list with 1 for each layer that rotates, 0 for others."""

    def random(self, sizes: Mapping[str, Any]) -> dict[str, Any]:
        layers = tuple(range(3, sizes["n_layers"], 4))
        return {**super().random(sizes), "layers_without_rope": layers}

    def read(self, config: HuggingFaceConfig, max_seq_len: int) -> dict[str, Any]:
        fields = super().read(config, max_seq_len)
        count = fields["n_layers"]
        flags = config.get("no_rope_layers")
        if flags is None:
            interval = config.size("no_rope_layer_interval")
            flags = [int((index + 1) % interval != 0) for index in range(count)]
        is_list = isinstance(flags, list) and len(flags) >= count
        allowed = f"it must be null or a list of 0 and 1 for each of {count} layers"
        holds = is_list and all(flag in (0, 1) for flag in flags)
        config.require(holds, "no_rope_layers", flags, allowed)
        without = tuple(index for index in range(count) if not flags[index])
        return fields | {"layers_without_rope": without}

    def write(self, shape: Mapping[str, Any]) -> dict[str, Any]:
        without = shape["layers_without_rope"]
        flags = [int(index not in without) for index in range(shape["n_layers"])]
        # transformers' pad token is beyond a small vocabulary
        return super().write(shape) | {"no_rope_layers": flags, "pad_token_id": None}


FAMILY = SmolLM3(
    model_type="smollm3",
    prefix="SmolLM3",
    fixed={"qk_norm": False},
    options={"attention_bias": ("qkv_bias", "output_bias"), "mlp_bias": ("feed_forward_bias",)},
    allowed={"use_sliding_window": (False, True)},
    has_windows=True,
)
