"""OpenAI's gpt-oss, of which every second layer has an attention window."""

from collections.abc import Mapping
from typing import Any

from rl.model.families.family import LOCAL_EXPERT_SIZES, Family
from rl.model.hugging_face_config import HuggingFaceConfig

WINDOW = 128
DEQUANTIZE = (
    "write a folder without it: GptOssForCausalLM.from_pretrained(FOLDER, "
    "quantization_config=Mxfp4Config(dequantize=True)).save_pretrained(ANOTHER)"
)
EXPERTS = "layers.{}.moe.routed_experts.inner_experts"


class GptOss(Family):
    """Family of experts with biases and a bounded activation, and attention with sinks."""

    def random(self, sizes: Mapping[str, Any]) -> dict[str, Any]:
        window = min(WINDOW, -(-sizes["max_seq_len"] // 2))
        layers = tuple(range(0, sizes["n_layers"], 2))
        return {**super().random(sizes), "window": window, "layers_with_window": layers}

    def read(self, config: HuggingFaceConfig, max_seq_len: int) -> dict[str, Any]:
        quantization = config.get("quantization_config")
        config.require(quantization is None, "quantization_config", quantization, DEQUANTIZE)
        config.config_class = self.config_class
        config.default_rope().pop("rope_theta", None)  # which the file may give
        fields = super().read(config, max_seq_len)
        swiglu = (config.number("swiglu_alpha"), config.number("swiglu_limit"))
        return fields | {"swiglu": swiglu}

    def write(self, shape: Mapping[str, Any]) -> dict[str, Any]:
        slope, bound = shape["swiglu"]
        layers = ["full_attention"] * shape["n_layers"]
        extra = {"layer_types": layers, "swiglu_alpha": slope, "swiglu_limit": bound}
        return extra | super().write(shape)


FAMILY = GptOss(
    model_type="gpt_oss",
    prefix="GptOss",
    fixed={
        "qk_norm": False,
        "qkv_bias": True,
        "output_bias": True,
        "router_bias": True,
        "sinks": True,
        "swiglu": (1.702, 7.0),
        "norm_eps": 1e-5,
    },
    options={"attention_bias": ("qkv_bias", "output_bias")},
    head_dim=64,
    expert_sizes=LOCAL_EXPERT_SIZES,
    has_windows=True,
    tensors={
        "layers.{}.attention.sinks": "model.layers.{}.self_attn.sinks",
        "layers.{}.moe.router.gate.weight": "model.layers.{}.mlp.router.weight",
        f"{EXPERTS}.gate_up_EDG": "model.layers.{}.mlp.experts.gate_up_proj",
        f"{EXPERTS}.gate_up_bias": "model.layers.{}.mlp.experts.gate_up_proj_bias",
        f"{EXPERTS}.down_EFD": "model.layers.{}.mlp.experts.down_proj",
        f"{EXPERTS}.down_bias": "model.layers.{}.mlp.experts.down_proj_bias",
    },
)
