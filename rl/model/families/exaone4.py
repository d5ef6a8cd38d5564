"""EXAONE 4 of LG, which normalizes outputs. If layers have windows, only these rotate."""

from collections.abc import Mapping
from typing import Any

from rl.model.families.family import OUTPUT_NORMS, Family
from rl.model.hugging_face_config import HuggingFaceConfig


class Exaone4(Family):
    """Family whose layers without a window do not rotate queries and keys."""

    def read(self, config: HuggingFaceConfig, max_seq_len: int) -> dict[str, Any]:
        fields = super().read(config, max_seq_len)
        without: tuple[int, ...] = ()
        if config["sliding_window"] is not None:
            rotating = config.windowed_layers()
            without = tuple(layer for layer in range(fields["n_layers"]) if layer not in rotating)
        return fields | {"layers_without_rope": without}

    def write(self, shape: Mapping[str, Any]) -> dict[str, Any]:
        without = shape["layers_without_rope"]
        layers = [
            "full_attention" if layer in without else "sliding_attention"
            for layer in range(shape["n_layers"])
        ]
        window = shape["window"] or shape["max_seq_len"]
        rotation = {"sliding_window": window, "layer_types": layers} if without else {}
        return {"layer_types": ["full_attention"] * len(layers)} | super().write(shape) | rotation


FAMILY = Exaone4(
    model_type="exaone4",
    prefix="Exaone4",
    fixed={"normalized": "outputs", "norm_eps": 1e-5},
    has_windows=True,
    tensors=OUTPUT_NORMS,
)
