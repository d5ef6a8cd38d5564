"""Qwen3.5, the language model alone: most layers have a gated delta net in place of attention."""

from collections.abc import Mapping
from typing import Any

from rl.model.families.family import REWARD_CLASS, Family
from rl.model.hugging_face_config import FULL, LINEAR, HuggingFaceConfig, layer_types

DELTA_SIZES = {
    "delta_key_heads": "linear_num_key_heads",
    "delta_value_heads": "linear_num_value_heads",
    "delta_key_dim": "linear_key_head_dim",
    "delta_value_dim": "linear_value_head_dim",
    "delta_kernel": "linear_conv_kernel_dim",
}
NET = "layers.{}.delta_net"
THEIRS = "model.layers.{}.linear_attn"
TENSORS = {
    **{
        f"{NET}.{part}.weight": f"{THEIRS}.in_proj_{part}.weight" for part in ("qkv", "z", "a", "b")
    },
    f"{NET}.conv.weight": f"{THEIRS}.conv1d.weight",
    f"{NET}.A_log": f"{THEIRS}.A_log",
    f"{NET}.dt_bias": f"{THEIRS}.dt_bias",
    f"{NET}.norm.weight": f"{THEIRS}.norm.weight",
    f"{NET}.wo.weight": f"{THEIRS}.out_proj.weight",
}
COMMON: dict[str, Any] = {
    "fixed": {"norm_offset": True, "attention_gate": True, "rope_share": 0.25},
    "options": {"attention_bias": ("qkv_bias", "output_bias")},
    "rope_share": 0.25,
    "left_out": ("visual.", "mtp."),
}
"""Fields of both families."""


class Qwen35(Family):
    """Family whose every fourth layer has attention, with a gate, unless ``layer_types`` says
    otherwise. The positions of text are the same on all axes of the rotary embedding.
    """

    @property
    def reward_class(self) -> str:
        return f"{self.prefix}Text{REWARD_CLASS}"

    @property
    def config_class(self) -> str:
        return f"{self.prefix}TextConfig"

    def random(self, sizes: Mapping[str, Any]) -> dict[str, Any]:
        heads = {"delta_key_heads": sizes["n_kv_heads"], "delta_value_heads": sizes["n_heads"]}
        widths = dict.fromkeys(("delta_key_dim", "delta_value_dim"), sizes["head_dim"])
        layers = sizes["n_layers"]
        every = min(4, layers)
        linear = tuple(layer for layer in range(layers) if (layer + 1) % every)
        extra = {"delta_kernel": 4, "layers_with_delta_rule": linear}
        return super().random(sizes) | heads | widths | extra

    def read(self, config: HuggingFaceConfig, max_seq_len: int) -> dict[str, Any]:
        layers = self._layers(config)
        config["layer_types"] = None
        config.one_of("attn_output_gate", (True, None), config.get("attn_output_gate"))
        fields = super().read(config, max_seq_len)
        delta = {name: config.size(key) for name, key in DELTA_SIZES.items()}
        keys, values = delta["delta_key_heads"], delta["delta_value_heads"]
        allowed = f"it must divide linear_num_value_heads={values}"
        config.require(values % keys == 0, "linear_num_key_heads", keys, allowed)
        return fields | delta | {"layers_with_delta_rule": layers}

    def write(self, shape: Mapping[str, Any]) -> dict[str, Any]:
        kinds = layer_types(shape["n_layers"], LINEAR, shape["layers_with_delta_rule"])
        sizes = {key: shape[name] for name, key in DELTA_SIZES.items()}
        return super().write(shape) | sizes | {"layer_types": kinds}

    def _layers(self, config: HuggingFaceConfig) -> tuple[int, ...]:
        """Return the layers with a delta net."""
        config.config_class = self.config_class
        count = config.size("num_hidden_layers")
        kinds = config.get("layer_types")
        if kinds is None:
            config.setdefault("full_attention_interval", 4)
            every = config.size("full_attention_interval")
            kinds = [LINEAR if (layer + 1) % every else FULL for layer in range(count)]
        is_list = isinstance(kinds, list) and len(kinds) == count
        holds = is_list and FULL in kinds and {*map(str, kinds)} <= {LINEAR, FULL}
        allowed = f"it must be {LINEAR!r} or {FULL!r} for each of {count} layers, and once {FULL!r}"
        config.require(holds, "layer_types", kinds, allowed)
        return tuple(layer for layer, kind in enumerate(kinds) if kind == LINEAR)


FAMILY = Qwen35(
    model_type="qwen3_5_text",
    prefix="Qwen3_5",
    other_names=("Qwen3_5TextModel", "Qwen3_5ForConditionalGeneration"),
    tensors=TENSORS,
    **COMMON,
)
