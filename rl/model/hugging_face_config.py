"""Reading of the config.json of a Hugging Face Qwen3, with transformers' defaults."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.errors import ConfigError, require

QWEN3_NORM_EPS = 1e-6
ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
REWARD_MODELS = {
    "qwen3": "Qwen3ForSequenceClassification",
    "qwen3_moe": "Qwen3MoeForSequenceClassification",
}
"""Classes of models with one score for a sequence in place of the output head."""

CONFIG_CLASSES = {"qwen3": "Qwen3Config", "qwen3_moe": "Qwen3MoeConfig"}
SIZES = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
}
"""Keys of sizes in config.json, by field of ModelShape."""

EXPERT_SIZES = {
    "num_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "moe_hidden_dim": "moe_intermediate_size",
}
"""Additional keys of a model with experts."""

LARGEST = {"num_hidden_layers": 1024, "num_experts": 2**16}
LARGEST_SIZE = 2**31 - 1
DTYPES = ("float32", "bfloat16", "float16")

ALLOWED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "attention_dropout": (0.0, 0),
    "hidden_act": ("silu",),
    "rms_norm_eps": (QWEN3_NORM_EPS,),
    "tie_word_embeddings": (True, False),
    "use_sliding_window": (False,),
}
ALLOWED_WITH_EXPERTS: dict[str, tuple[Any, ...]] = {
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
    "norm_topk_prob": (True,),
}
ALLOWED_IF_PRESENT: dict[str, tuple[Any, ...]] = {
    "auto_map": (None,),
    "compression_config": (None,),
    "configuration_files": (None,),
    "dual_chunk_attention_config": (None,),
    "is_causal": (True, None),
    "partial_rotary_factor": (1.0, 1, None),
    "per_layer_config": (None,),
    "quantization_config": (None,),
    "shared_expert_intermediate_size": (0, None),
    "transformers_weights": (None,),
}
"""Keys that transformers' Qwen3 configs do not list, but that change the computation or the files
of the model."""


class HuggingFaceConfig(dict[str, Any]):
    """A config.json. ``[key]`` is transformers' default if the file lacks the key."""

    def __missing__(self, key: str) -> Any:
        import transformers  # takes a second; published configs are complete

        defaults = getattr(transformers, CONFIG_CLASSES[self["model_type"]])
        if key == "head_dim" and not hasattr(defaults, key):
            return self["hidden_size"] // self["num_attention_heads"]
        return getattr(defaults, "default_theta" if key == "rope_theta" else key)


def read_json(field: str, path: Path) -> dict[str, Any]:
    """Return the JSON object in ``path``.

    Raises ConfigError, naming ``field`` and ``path``, if the file cannot be read or holds no
    object.
    """
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", field=field) from None
    kind = type(content).__name__
    fix = "it must be a JSON object, {...}"
    require(kind == "dict", f"{path} holds a {kind}", field=field, fix=fix)
    return content  # type: ignore[no-any-return]


def read_config(field: str, folder: Path) -> HuggingFaceConfig:
    """Return the config.json of ``folder``. It has the keys ``rope_theta`` and ``dtype`` whichever
    layout the file uses.

    Raises ConfigError, naming ``field``, key and value, for a model that torchtitan's Qwen3 cannot
    compute.
    """
    path = folder / "config.json"
    config = HuggingFaceConfig(read_json(field, path))
    check = _Check(field, path)
    check.one_of("model_type", config.get("model_type"), tuple(ARCHITECTURES))
    kind = config["model_type"]
    has_experts = kind == "qwen3_moe"
    classes: tuple[Any, ...] = ([ARCHITECTURES[kind]], [REWARD_MODELS[kind]], [], None)
    check.one_of("architectures", config.get("architectures"), classes)
    for key, allowed in ALLOWED_IF_PRESENT.items():
        check.one_of(key, config.get(key), allowed)
    for key, allowed in (ALLOWED | (ALLOWED_WITH_EXPERTS if has_experts else {})).items():
        check.one_of(key, config[key], allowed)
    if "num_local_experts" in config:  # transformers' name takes precedence
        config["num_experts"] = config["num_local_experts"]
    if config["num_key_value_heads"] is None and not has_experts:
        config["num_key_value_heads"] = config["num_attention_heads"]
    sizes = SIZES | (EXPERT_SIZES if has_experts else {})
    for key in (*sizes.values(), "max_position_embeddings"):
        config[key] = check.size(key, config[key])
    _check_relations(check, config, has_experts)
    config["rope_theta"] = _rope_theta(check, config)
    config["dtype"] = next(
        (config[key] for key in ("dtype", "torch_dtype") if config.get(key) is not None), DTYPES[0]
    )
    check.one_of("dtype", config["dtype"], DTYPES)
    return config


@dataclass(frozen=True, slots=True)
class _Check:
    """Checks that raise ConfigError, naming field, key, file and value."""

    field: str
    path: Path

    def require(self, condition: bool, key: str, value: Any, allowed: str) -> None:
        problem = f"{key} in {self.path} is {value!r}"
        require(condition, problem, field=self.field, fix=allowed)

    def one_of(self, key: str, value: Any, allowed: tuple[Any, ...]) -> None:
        holds = any(value == each and type(value) is type(each) for each in allowed)
        listed = " or ".join(repr(each) for each in allowed if each is not None)
        self.require(holds, key, value, f"Tiller trains {listed or 'models without it'} only")

    def size(self, key: str, value: Any) -> Any:
        largest = LARGEST.get(key, LARGEST_SIZE)
        holds = type(value) is int and 1 <= value <= largest
        self.require(holds, key, value, f"it must be a whole number from 1 to {largest}")
        return value


def _check_relations(check: _Check, config: HuggingFaceConfig, has_experts: bool) -> None:
    """Raise ConfigError if sizes do not fit each other."""
    heads = config["num_attention_heads"]
    groups = config["num_key_value_heads"]
    allowed = f"it must divide num_attention_heads={heads}"
    check.require(heads % groups == 0, "num_key_value_heads", groups, allowed)
    layers = config.get("layer_types")
    is_full = layers is None or layers == ["full_attention"] * config["num_hidden_layers"]
    allowed = "it must be null, or 'full_attention' for each of num_hidden_layers"
    check.require(is_full, "layer_types", layers, allowed)
    if has_experts:
        chosen = config["num_experts_per_tok"]
        experts = config["num_experts"]
        allowed = f"it must be at most num_experts={experts}"
        check.require(chosen <= experts, "num_experts_per_tok", chosen, allowed)


def _rope_theta(check: _Check, config: HuggingFaceConfig) -> float:
    """Return the base of the rotary embedding, as transformers reads it: from rope_scaling, or from
    rope_parameters if rope_scaling is empty. If that object has none, return rope_theta or its
    default.
    """
    place = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(place) or {}
    is_flat = isinstance(rope, dict) and not any(isinstance(value, dict) for value in rope.values())
    allowed = "it must be null or an object with one rope_type for all layers"
    check.require(is_flat, place, rope, allowed)
    kind = rope.get("rope_type", rope.get("type", "default"))
    check.one_of(f"rope_type of {place}", kind, ("default",))
    key = "partial_rotary_factor"
    check.one_of(key, rope.get(key), ALLOWED_IF_PRESENT[key])
    theta = rope["rope_theta"] if "rope_theta" in rope else config["rope_theta"]
    is_number = type(theta) in (int, float) and math.isfinite(theta) and theta > 0
    check.require(is_number, "rope_theta", theta, "it must be a finite number above 0")
    return float(theta)
