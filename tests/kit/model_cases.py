"""Model folders with equal meaning, with unsupported values, or with damage."""

import re
from dataclasses import replace
from typing import Any

import torch

from tests.kit.model_folders import (
    GONE,
    INDEX,
    ONE_FILE,
    Folder,
    both_forms,
    cast,
    change_a_row_of_the_head,
    index_one_shard,
    lose_shard,
    rename,
    repeat_tensor,
    shards,
    stack_experts,
    store_head_of_tied,
    tensors,
    text,
    truncate,
    weight_map,
    within_vision,
)

OLD_ROPE = {"rope_parameters": GONE, "rope_scaling": None, "rope_theta": 5e5}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
HUB = OLD_ROPE | {
    "dtype": GONE,
    "torch_dtype": "float32",
    "layer_types": GONE,
    "sliding_window": None,
}
BIASES = {f"model__layers__{n}__self_attn__q_proj__bias": torch.ones(128) for n in (0, 1)}
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
UP = "model.layers.0.mlp.up_proj.weight"
MATRICES = [f"model.layers.{n}.mlp.{name}_proj.weight" for n in (0, 1) for name in ("up", "down")]
ABSURD = {"num_hidden_layers": 1000, "num_local_experts": 65_000, "layer_types": GONE}
TIED = {"tie_word_embeddings": True}
OLD_LENGTH = {"original_max_position_embeddings": 64}
WIDE = {"hidden_size": 128}
DEEP = {"num_hidden_layers": 4}
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
LONG = YARN | {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
NO_DROP = {"residual_dropout": 0.0, "attention_dropout": 0.0}
SCALES = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
}
SCALED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 8.0}
BOUNDS = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}
FACTORS = {
    "short_factor": [1.0 + 0.1 * n for n in range(12)],
    "long_factor": [2.0 + n for n in range(12)],
}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, **FACTORS}
QWEN3_5 = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16},
    **{"linear_value_head_dim": 24, "linear_conv_kernel_dim": 4},
}
QWEN3_5_MOE = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "shared_expert_intermediate_size": 32,
}
MROPE = {
    **{"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.25},
    **{"mrope_section": [2, 1, 1], "mrope_interleaved": True},
}
LINEAR_ATTENTION = "linear_attention"
FULL, NEAR = "full_attention", "sliding_attention"
FP8 = torch.float8_e4m3fn

EQUAL: dict[str, Folder] = {
    "as transformers saves it": Folder(),
    "as the Hub has it": Folder(config=HUB),
    "tied": Folder(TIED),
    "tied, its head stored": Folder(TIED, damage=store_head_of_tied),
    "no tie_word_embeddings": Folder(config={"tie_word_embeddings": GONE}),
    "no rope_theta": Folder({"rope_parameters": GONE}, config={"rope_parameters": GONE}),
    "no rope_theta in rope_parameters": Folder(
        {"rope_parameters": GONE}, config={"rope_parameters": {"rope_type": "default"}}
    ),
    "rope_theta beside rope_parameters": Folder(
        config={"rope_parameters": {"rope_type": "default"}, "rope_theta": 5e5}
    ),
    "two rope_thetas": Folder(config={"rope_theta": 1e4}),
    "an integer rope_theta": Folder(config=OLD_ROPE | {"rope_theta": 500000}),
    "rope_scaling of type default": Folder(config=OLD_ROPE | {"rope_scaling": {"type": "default"}}),
    "rope_scaling of no type": Folder(config=OLD_ROPE | {"rope_scaling": {"factor": 4.0}}),
    "rope_type before type": Folder(
        config=OLD_ROPE | {"rope_scaling": {"rope_type": "default", "type": "yarn"}}
    ),
    "rope_scaling before rope_parameters": Folder(
        config={"rope_scaling": {"type": "default", "rope_theta": 5e5}}
    ),
    "rotation of the whole head": Folder(config={"partial_rotary_factor": 1.0}),
    "no head_dim": Folder({"head_dim": GONE}, config={"head_dim": GONE}),
    "no num_key_value_heads": Folder(
        {"num_attention_heads": 32, "num_key_value_heads": GONE},
        config={"num_key_value_heads": GONE},
    ),
    "num_key_value_heads of null": Folder(
        {"num_key_value_heads": 4}, config={"num_key_value_heads": None}
    ),
    "no flags": Folder(
        config=dict.fromkeys(
            ("attention_bias", "attention_dropout", "use_sliding_window", "layer_types"), GONE
        )
    ),
    "no rms_norm_eps, no hidden_act": Folder(
        config=dict.fromkeys(("rms_norm_eps", "hidden_act"), GONE)
    ),
    "no dtype, no architectures": Folder(config=dict.fromkeys(("dtype", "architectures"), GONE)),
    "a window that is not used": Folder(
        config={"sliding_window": 16, "max_window_layers": 0, "layer_types": GONE}
    ),
    "experts that a dense model ignores": Folder(
        config={"num_experts": 4, "num_experts_per_tok": 2}
    ),
    "keys of other models": Folder(
        config={"logit_scale": 2.0, "resid_pdrop": 0.5, "my_note": {"a": 1}}
    ),
    "bfloat16": Folder(dtype="bfloat16"),
    "float16": Folder(dtype="float16"),
    "two dtypes": Folder(config={"torch_dtype": "bfloat16", "dtype": "float32"}),
    "float64 in the file": Folder(damage=cast(torch.float64)),
    "several files": shards(),
    "one file and an index": Folder(damage=index_one_shard),
    "swish": Folder(config={"hidden_act": "swish"}),
    "other names of layer types": Folder(config={"layer_types": ["attention"] * 2}),
    "names without model.": Folder(
        damage=rename(lambda name: name.removeprefix("model.")),
        config={"architectures": ["Qwen3Model"]},
    ),
    "names with model. twice": Folder(damage=rename("model.{}".format)),
    "tied, its head alone stored": Folder(
        TIED, damage=rename(lambda name: HEAD if name == EMBEDDING else name)
    ),
    "float32 norms beside bfloat16 matrices": Folder(
        damage=cast(torch.bfloat16, *MATRICES), config={"dtype": "bfloat16"}
    ),
    "float32 in the file of a bfloat16 model": Folder(config={"dtype": "bfloat16"}),
    "experts": Folder(experts=True),
    "experts, as the Hub has them": Folder(
        experts=True,
        config=HUB | {"num_local_experts": GONE, "num_experts": 4, "mlp_only_layers": []},
    ),
    "experts, no head_dim": Folder(
        {"head_dim": GONE, "hidden_size": 128},
        experts=True,
        config={"head_dim": GONE, "mlp_only_layers": None},
    ),
    "experts, two numbers of them": Folder(experts=True, config={"num_experts": 8}),
    "experts, no moe_intermediate_size": Folder(
        {"moe_intermediate_size": GONE},
        experts=True,
        config=dict.fromkeys(("moe_intermediate_size",), GONE),
    ),
}
"""Folders from which Tiller and transformers make the same model."""


def scaled(family: str, **rope: Any) -> Folder:
    """A model with a scaled rotary embedding."""
    return Folder({"rope_parameters": {"rope_theta": 1e4, **rope}}, family=family)


def old_layout(folder: Folder, kind: str = "type") -> Folder:
    """The same model with the keys that config.json had before ``rope_parameters``."""
    rope = dict(folder.sizes["rope_parameters"])
    theta = rope.pop("rope_theta")
    config = {"rope_parameters": GONE, "rope_scaling": {kind: rope.pop("rope_type"), **rope}}
    return replace(folder, config={**config, "rope_theta": theta})


def gpt_oss(folder: Folder | None = None, **sizes: Any) -> Folder:
    """A gpt-oss whose window is shorter than the sequences of the tests."""
    folder = folder or Folder()
    return replace(folder, sizes=GPT_OSS | folder.sizes | sizes, family="gpt_oss")


def olmo3(**sizes: Any) -> Folder:
    """An OLMo 3 of which all layers but the last have a window and rotate in another way."""
    ropes = {NEAR: {"rope_theta": 5e5}, FULL: {"rope_theta": 5e5, **SCALED}}
    own = {"rope_parameters": ropes, "sliding_window": 8, "layer_types": [NEAR] * 3 + [FULL]}
    return Folder(DEEP | own | sizes, family="olmo3")


def gemma3(**sizes: Any) -> Folder:
    """A Gemma 3 of which all layers but the last have a window and rotate in another way."""
    ropes = {NEAR: {"rope_theta": 1e3}, FULL: {"rope_theta": 1e6, **LINEAR}}
    own = {"rope_parameters": ropes, "sliding_window": 8, "layer_types": [NEAR] * 3 + [FULL]}
    scale = {"query_pre_attn_scalar": 24}
    return Folder(DEEP | TIED | own | scale | sizes, family="gemma3_text")


def gemma2(**sizes: Any) -> Folder:
    """A Gemma 2 every second layer of which has a window, with bounds that matter."""
    own = {"sliding_window": 8, "layer_types": [NEAR, FULL] * 2, "query_pre_attn_scalar": 24}
    return Folder(DEEP | TIED | own | BOUNDS | sizes, family="gemma2")


def phi3(**sizes: Any) -> Folder:
    """A Phi-3 whose sequences were at most 2,048 tokens before they were scaled to 8,192."""
    lengths = {"original_max_position_embeddings": 2048, "max_position_embeddings": 8192}
    return Folder({"hidden_size": 128, **lengths} | sizes, family="phi3")


def qwen3_5(**sizes: Any) -> Folder:
    """A Qwen3.5 with attention in its last layer alone."""
    return Folder(DEEP | QWEN3_5 | sizes, family="qwen3_5_text")


def qwen3_5_moe(**sizes: Any) -> Folder:
    """A Qwen3.5 with experts, the last layer of which has attention."""
    gone = {"intermediate_size": GONE}
    return Folder(DEEP | QWEN3_5 | QWEN3_5_MOE | gone | sizes, family="qwen3_5_moe_text")


WINDOW = {"use_sliding_window": True, "sliding_window": 2048, "max_window_layers": 1}
SHORT = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
FAMILIES: dict[str, Folder] = {
    "llama": Folder(family="llama"),
    "llama 2": Folder(
        {**dict.fromkeys(("num_key_value_heads", "rope_parameters", "head_dim"), GONE), **WIDE},
        family="llama",
        config=dict.fromkeys(("head_dim", "num_key_value_heads", "rope_parameters"), GONE),
    ),
    "llama 3.1": scaled("llama", **LLAMA3),
    "llama 3.2": Folder(
        TIED | {"rope_parameters": {"rope_theta": 5e5, **LLAMA3, "factor": 32.0}}, family="llama"
    ),
    "llama 3.1, older keys": old_layout(scaled("llama", **LLAMA3), "rope_type"),
    "llama, linear": scaled("llama", rope_type="linear", factor=4.0),
    "llama, linear, older keys": old_layout(scaled("llama", rope_type="linear", factor=2.0)),
    "llama, dynamic": scaled("llama", rope_type="dynamic", factor=2.0),
    "llama, yarn": scaled("llama", rope_type="yarn", factor=4.0),
    "llama, its length beside rope_scaling": Folder(
        {"rope_parameters": {"rope_theta": 1e4, **LLAMA3}},
        family="llama",
        config={"original_max_position_embeddings": 32},
    ),
    "llama, biases": Folder({"attention_bias": True, "mlp_bias": True}, family="llama"),
    "llama, tied, biases of attention": Folder(TIED | {"attention_bias": True}, family="llama"),
    "llama, wide heads": Folder({"head_dim": 64}, family="llama"),
    "llama, a window that it ignores": Folder(family="llama", config={"sliding_window": 8}),
    "llama, no dropout": Folder(family="llama", config={"attention_dropout": None}),
    "llama, one key head": Folder({"num_key_value_heads": 1}, family="llama"),
    "llama, bfloat16": Folder(family="llama", dtype="bfloat16"),
    "llama, several files": replace(shards(), family="llama"),
    "llama, older keys": Folder(
        family="llama", config=OLD_ROPE | {"pretraining_tp": 2, "torch_dtype": "float32"}
    ),
    "qwen2": Folder(family="qwen2"),
    "qwen2, tied": Folder(TIED, family="qwen2"),
    "qwen2, its head size given": Folder(family="qwen2", config={"head_dim": 32}),
    "qwen2, a window as long as a sequence": Folder(WINDOW, family="qwen2"),
    "qwen2, yarn": scaled("qwen2", rope_type="yarn", factor=4.0, **OLD_LENGTH),
    "qwen2, yarn, older keys": old_layout(
        scaled("qwen2", rope_type="yarn", factor=4.0, **OLD_LENGTH)
    ),
    "qwen2, float16": Folder(family="qwen2", dtype="float16"),
    "qwen2, several files": replace(shards(), family="qwen2"),
    "qwen2, as the Hub has it": Folder(family="qwen2", config=HUB | {"max_window_layers": 1}),
    "mistral": Folder({"sliding_window": None}, family="mistral"),
    "mistral, a window as long as a sequence": Folder({"sliding_window": 2048}, family="mistral"),
    "mistral, no sliding_window": Folder(family="mistral", config={"sliding_window": GONE}),
    "mistral, heads that do not divide the width": Folder(
        {"sliding_window": None, "num_attention_heads": 6, "head_dim": 32}, family="mistral"
    ),
    "mistral, layers with and without windows": Folder(
        {"sliding_window": 8}, family="mistral", config={"layer_types": [FULL, NEAR]}
    ),
    "mistral, no types of layers": Folder(
        {"sliding_window": 8}, family="mistral", config={"layer_types": None}
    ),
    "ministral": Folder({"sliding_window": 8, "layer_types": [NEAR, FULL]}, family="ministral"),
    "ministral, as the Hub has it": Folder(
        {"sliding_window": 8}, family="ministral", config=OLD_ROPE
    ),
    "mistral, yarn": scaled("mistral", rope_type="yarn", factor=8.0, mscale=1.0, **OLD_LENGTH),
    "qwen3, yarn": scaled("qwen3", rope_type="yarn", factor=4.0, **OLD_LENGTH),
    "qwen3, yarn, an attention factor": scaled(
        "qwen3", rope_type="yarn", factor=4.0, attention_factor=1.5, **OLD_LENGTH
    ),
    "qwen3, yarn, every number": scaled(
        "qwen3",
        **{"rope_type": "yarn", "factor": 8, "beta_fast": 16, "beta_slow": 2, "truncate": False},
        **{"mscale": 0.7, "mscale_all_dim": 0.5},
        **OLD_LENGTH,
    ),
    "qwen3, yarn before rope_parameters": Folder(
        {"rope_parameters": GONE}, config={"rope_scaling": YARN}
    ),
    "qwen3, biases": Folder({"attention_bias": True}),
    "qwen3, another epsilon": Folder({"rms_norm_eps": 1e-2}),
    "qwen3, a window as long as a sequence": Folder(WINDOW),
    "qwen3, yarn, nulls and zeros": Folder(
        config=OLD_ROPE | {"rope_scaling": YARN | {"truncate": None, "beta_fast": 0, "mscale": 0}}
    ),
    "experts, yarn": replace(scaled("", rope_type="yarn", factor=4.0, **OLD_LENGTH), experts=True),
    "experts, biases": Folder({"attention_bias": True}, experts=True),
    "smollm3": Folder(DEEP, family="smollm3"),
    "smollm3, every second layer": Folder(DEEP | {"no_rope_layer_interval": 2}, family="smollm3"),
    "smollm3, a list of layers": Folder(
        DEEP | {"no_rope_layers": [0, 1, 1, 0], "attention_bias": True, "mlp_bias": True},
        family="smollm3",
    ),
    "smollm3, yarn": replace(
        scaled("smollm3", rope_type="yarn", factor=4.0, **OLD_LENGTH), family="smollm3"
    ),
    "mistral, windows": Folder({"sliding_window": 8}, family="mistral"),
    "qwen2, windows from a layer on": Folder(SHORT, family="qwen2", config={"layer_types": GONE}),
    "qwen3, windows": Folder(SHORT | {"layer_types": [NEAR, FULL]}),
    "experts, windows": Folder(SHORT, experts=True),
    "experts, windows, types of layers that it ignores": Folder(
        SHORT, experts=True, config={"layer_types": [FULL] * 2}
    ),
    "smollm3, windows": Folder(
        DEEP | SHORT | {"no_rope_layer_interval": 2}, family="smollm3", config={"layer_types": GONE}
    ),
    "gpt_oss": gpt_oss(),
    "gpt_oss, as the Hub has it": replace(
        gpt_oss(num_hidden_layers=3, rope_parameters=LONG),
        config={
            **{"rope_parameters": GONE, "rope_scaling": LONG, "rope_theta": 150000},
            **{"swiglu_alpha": GONE, "experts_per_token": 2, "initial_context_length": 64},
        },
    ),
    "gpt_oss, no rope_parameters": replace(
        gpt_oss(rope_parameters=GONE, layer_types=[FULL, NEAR]), config={"rope_parameters": GONE}
    ),
    "gpt_oss, tied, no layer_types": replace(
        gpt_oss(tie_word_embeddings=True), config={"layer_types": GONE}
    ),
    "gpt_oss, every layer with a window": gpt_oss(layer_types=[NEAR] * 2),
    "gpt_oss, no layer with a window": gpt_oss(layer_types=[FULL] * 2),
    "gpt_oss, a window as long as a sequence": gpt_oss(sliding_window=2048),
    "gpt_oss, wide heads, one key head": gpt_oss(num_attention_heads=6, num_key_value_heads=1),
    "gpt_oss, tight bounds": gpt_oss(swiglu_alpha=1.2, swiglu_limit=0.5),
    "gpt_oss, no biases of attention": gpt_oss(attention_bias=False),
    "gpt_oss, another name of a size": replace(
        gpt_oss(), config={"num_local_experts": GONE, "num_experts": 4}
    ),
    "gpt_oss, bfloat16": replace(gpt_oss(), dtype="bfloat16"),
    "gpt_oss, several files": gpt_oss(shards()),
    "experts, weights that do not sum to 1": Folder({"norm_topk_prob": False}, experts=True),
    "cwm": Folder({"sliding_window": 8, "layer_types": GONE}, family="cwm"),
    "cwm, as the Hub has it": Folder(
        DEEP | {"rope_parameters": {"rope_theta": 1e6, **LLAMA3}, "sliding_window": 8},
        family="cwm",
        config={"layer_types": GONE},
    ),
    "mixtral": Folder(MIXTRAL, family="mixtral"),
    "mixtral, tied, windows": Folder(MIXTRAL | TIED | {"sliding_window": 8}, family="mixtral"),
    "mixtral, as the Hub has it": Folder(
        MIXTRAL, family="mixtral", config=OLD_ROPE | {"sliding_window": None}
    ),
    "mixtral, bfloat16, several files": replace(
        shards(), sizes=MIXTRAL, family="mixtral", dtype="bfloat16"
    ),
    "seed_oss": Folder(NO_DROP, family="seed_oss"),
    "seed_oss, tied, all biases": Folder(
        TIED | dict.fromkeys(("attention_bias", "attention_out_bias", "mlp_bias"), True) | NO_DROP,
        family="seed_oss",
    ),
    "ernie4_5": Folder(family="ernie4_5"),
    "ernie4_5, tied, biases, bfloat16": Folder(
        TIED | {"use_bias": True}, family="ernie4_5", dtype="bfloat16"
    ),
    "ernie4_5, older keys, yarn": old_layout(
        scaled("ernie4_5", rope_type="yarn", factor=4.0, **OLD_LENGTH)
    ),
    "helium": Folder(WIDE, family="helium"),
    "helium, tied, biases": Folder(
        TIED | WIDE | {"attention_bias": True, "mlp_bias": True}, family="helium"
    ),
    "granite": Folder(SCALES, family="granite"),
    "granite, tied, biases": Folder(
        TIED | SCALES | {"attention_bias": True, "mlp_bias": True}, family="granite"
    ),
    "granite, scales of 1": Folder({"attention_multiplier": 0.25}, family="granite"),
    "granite, older keys": replace(
        old_layout(replace(scaled("granite", **LLAMA3), family="granite"), "rope_type"),
        dtype="bfloat16",
    ),
    "hunyuan_v1_dense": Folder(family="hunyuan_v1_dense"),
    "hunyuan_v1_dense, tied, biases": Folder(
        TIED | {"attention_bias": True}, family="hunyuan_v1_dense"
    ),
    "hunyuan_v1_dense, alpha": scaled(
        "hunyuan_v1_dense", rope_type="dynamic", alpha=1000.0, factor=1.0
    ),
    "exaone4": Folder({"sliding_window": None, "layer_types": [FULL] * 2}, family="exaone4"),
    "exaone4, windows": Folder(
        DEEP | {"sliding_window": 8, "layer_types": [NEAR, FULL, NEAR, FULL]}, family="exaone4"
    ),
    "exaone4, a window as long as a sequence": Folder(
        DEEP | TIED | {"sliding_window": 2048}, family="exaone4", config={"layer_types": GONE}
    ),
    "olmo2": Folder(family="olmo2"),
    "olmo2, tied, biases, several files": replace(
        shards(), sizes=TIED | {"attention_bias": True}, family="olmo2"
    ),
    "olmo2, as the Hub has it": Folder(family="olmo2", config=HUB | {"sliding_window": GONE}),
    "olmo2, bfloat16": Folder(family="olmo2", dtype="bfloat16"),
    "olmo3": olmo3(),
    "olmo3, as the Hub has it": replace(
        olmo3(rope_parameters={FULL: {"rope_theta": 5e5, **SCALED}}),
        config={"rope_parameters": GONE, "rope_scaling": SCALED, "rope_theta": 500000},
    ),
    "olmo3, tied, two bases, biases": olmo3(
        **TIED,
        attention_bias=True,
        rope_parameters={NEAR: {"rope_theta": 1e3}, FULL: {"rope_theta": 1e6}},
    ),
    "olmo3, no rope_parameters": replace(
        olmo3(rope_parameters=GONE), config={"rope_parameters": GONE, "rope_theta": 1e6}
    ),
    "olmo3, a window as long as a sequence": olmo3(
        sliding_window=2048, rope_parameters={NEAR: {"rope_theta": 1e3}}
    ),
    "olmo3, no layer with a window": olmo3(layer_types=[FULL] * 4),
    "olmo3, no layer_types, bfloat16": replace(
        olmo3(), config={"layer_types": GONE}, dtype="bfloat16"
    ),
    "olmo3, parameters of no kind": olmo3(
        rope_parameters={
            **{"rope_type": "default", "rope_theta": 1e3, "factor": 2.0},
            **{NEAR: {"rope_theta": 5e5}, FULL: {"rope_theta": 5e5, **SCALED}},
        }
    ),
    "gemma2": gemma2(),
    "gemma2, as the Hub has it": replace(
        gemma2(),
        config=OLD_ROPE
        | {**dict.fromkeys(("layer_types", "tie_word_embeddings", "dtype"), GONE)}
        | {"torch_dtype": "float32"},
    ),
    "gemma2, untied, biases": gemma2(tie_word_embeddings=False, attention_bias=True),
    "gemma2, no bounds": gemma2(**dict.fromkeys(BOUNDS)),
    "gemma2, bounds of the logits alone": gemma2(attn_logit_softcapping=None),
    "gemma2, a window as long as a sequence": gemma2(sliding_window=2048),
    "gemma2, one key head, bfloat16": replace(gemma2(num_key_value_heads=1), dtype="bfloat16"),
    "gemma2, several files": replace(gemma2(), max_shard_size="20KB"),
    "gemma3_text, parameters of no kind": replace(
        gemma3(),
        config={
            "rope_parameters": {
                **{"rope_type": "default", "rope_theta": 1e3},
                **{NEAR: {"rope_theta": 1e3}, FULL: {"rope_theta": 1e6, **LINEAR}},
            }
        },
    ),
    "gemma3_text": gemma3(),
    "gemma3_text, as the Hub has it": replace(
        gemma3(rope_parameters={NEAR: {"rope_theta": 1e4}, FULL: {"rope_theta": 1e6, **LINEAR}}),
        config={
            **{"rope_parameters": GONE, "layer_types": GONE, "rope_theta": 1000000},
            **{"rope_local_base_freq": 10000, "rope_scaling": LINEAR, "sliding_window_pattern": 4},
            **{"tie_word_embeddings": GONE, "dtype": GONE, "torch_dtype": "float32"},
        },
    ),
    "gemma3_text, untied, biases": gemma3(tie_word_embeddings=False, attention_bias=True),
    "gemma3_text, no bases": replace(
        gemma3(rope_parameters=GONE), config={"rope_parameters": GONE}
    ),
    "gemma3_text, a window as long as a sequence": gemma3(sliding_window=2048),
    "gemma3_text, no layer with a window": gemma3(layer_types=[FULL] * 4),
    "gemma3_text, one key head": gemma3(num_key_value_heads=1),
    "gemma3_text, bfloat16": replace(gemma3(), dtype="bfloat16"),
    "gemma3_text, several files": replace(gemma3(), max_shard_size="20KB"),
    "glm4": Folder(family="glm4"),
    "glm4, as the Hub has it": Folder(
        {"partial_rotary_factor": 0.5},
        family="glm4",
        config=OLD_ROPE | {"partial_rotary_factor": 0.5, "rope_scaling": GONE},
    ),
    "glm4, a quarter of a head, tied, no biases": Folder(
        TIED | {"partial_rotary_factor": 0.25, "attention_bias": False}, family="glm4"
    ),
    "glm4, whole heads": Folder({"partial_rotary_factor": 1.0}, family="glm4"),
    "glm4, yarn": scaled("glm4", rope_type="yarn", factor=4.0, **OLD_LENGTH),
    "glm4, one key head, bfloat16": Folder(
        {"num_key_value_heads": 1}, family="glm4", dtype="bfloat16"
    ),
    "glm4, several files": replace(shards(), family="glm4"),
    "glm4, another epsilon": Folder({"rms_norm_eps": 1e-3}, family="glm4"),
    "phi3": phi3(),
    "phi3, as the Hub has it": replace(
        phi3(rope_parameters=LONGROPE, partial_rotary_factor=0.75, **TIED),
        config=OLD_ROPE
        | {"rope_theta": 1e4, "partial_rotary_factor": 0.75, "sliding_window": 262144}
        | {"rope_scaling": {"type": "longrope", **FACTORS}},
    ),
    "phi3, a factor": phi3(rope_parameters=LONGROPE | {"factor": 4.0}, partial_rotary_factor=0.75),
    "phi3, longrope, several files": replace(
        phi3(rope_parameters=LONGROPE, partial_rotary_factor=0.75),
        max_shard_size="20KB",
    ),
    "phi3, half of a head": phi3(partial_rotary_factor=0.5),
    "phi3, windows, one key head": phi3(sliding_window=8, num_key_value_heads=1),
    "phi3, no num_key_value_heads": phi3(num_attention_heads=2, num_key_value_heads=GONE),
    "phi3, tied, bfloat16": replace(phi3(**TIED), dtype="bfloat16"),
    "qwen3_5_text": qwen3_5(),
    "qwen3_5_text, tied, biases": qwen3_5(**TIED, attention_bias=True),
    "qwen3_5_text, three axes, bfloat16": replace(qwen3_5(rope_parameters=MROPE), dtype="bfloat16"),
    "qwen3_5_text, every second layer": qwen3_5(
        layer_types=[FULL, LINEAR_ATTENTION] * 2, partial_rotary_factor=0.5
    ),
    "qwen3_5_text, attention alone": qwen3_5(layer_types=[FULL] * 4),
    "qwen3_5_text, one key head, wide keys": qwen3_5(
        linear_num_key_heads=1, linear_key_head_dim=32, linear_conv_kernel_dim=3
    ),
    "qwen3_5_text, as many key heads as value heads": qwen3_5(linear_num_key_heads=4),
    "qwen3_5_text, no layer_types": replace(
        qwen3_5(layer_types=[LINEAR_ATTENTION, FULL] * 2),
        config={"layer_types": GONE, "full_attention_interval": 2, "attn_output_gate": True},
    ),
    "qwen3_5_text, within a model with vision": replace(qwen3_5(), damage=within_vision),
    "qwen3_5_text, several files": replace(qwen3_5(), max_shard_size="20KB"),
    "qwen3_5_moe_text": qwen3_5_moe(),
    "qwen3_5_moe_text, tied, float16": replace(qwen3_5_moe(**TIED), dtype="float16"),
    "qwen3_5_moe_text, all experts in one tensor": replace(qwen3_5_moe(), damage=stack_experts),
    "qwen3_5_moe_text, within a model with vision": replace(
        qwen3_5_moe(), damage=lambda folder: within_vision(stack_experts(folder))
    ),
}
"""Folders of all families from which Tiller and transformers make the same model."""
EQUAL |= FAMILIES


VALUES: tuple[tuple[str, Any], ...] = (
    ("rope_scaling", "yarn"),
    ("partial_rotary_factor", 0.5),
    ("use_sliding_window", 1),
    ("layer_types", ["full_attention", "sliding_attention"]),
    ("layer_types", ["full_attention"] * 3),
    ("attention_bias", 1),
    ("attention_dropout", 0.1),
    ("hidden_act", "gelu"),
    ("rms_norm_eps", 0.0),
    ("quantization_config", {"quant_method": "fp8"}),
    ("compression_config", {"format": "int"}),
    ("dual_chunk_attention_config", {"chunk_size": 8}),
    ("configuration_files", ["config.4.json"]),
    ("per_layer_config", {"0": {"hidden_act": "gelu"}}),
    ("is_causal", False),
    ("auto_map", {"AutoModelForCausalLM": "m.M"}),
    ("transformers_weights", "other.safetensors"),
    ("architectures", ["Qwen3ForSequenceClassification"]),
    ("model_type", "gemma9"),
    ("dtype", "float8_e4m3fn"),
    ("hidden_size", "64"),
    ("num_hidden_layers", 2.0),
    ("num_hidden_layers", 0),
    ("head_dim", 0),
    ("tie_word_embeddings", 1),
)
"""Keys of config.json with values that are refused."""

VALUES_WITH_EXPERTS: tuple[tuple[str, Any], ...] = (
    ("decoder_sparse_step", 2),
    ("mlp_only_layers", [0]),
    ("shared_expert_intermediate_size", 24),
    ("num_key_value_heads", None),
)


def refused(key: str, value: Any, folder: Folder | None = None) -> tuple[Folder, str]:
    """Return ``folder`` with ``value`` of ``key``, and how the message names both."""
    folder = folder or Folder()
    changed = replace(folder, config=folder.config | {key: value})
    return changed, f"{key} .* is {re.escape(repr(value))}"


REFUSED: dict[str, tuple[Folder, str]] = {
    **{f"{key} {value}": refused(key, value) for key, value in VALUES},
    **{
        f"{key} {value}": refused(key, value, Folder(experts=True))
        for key, value in VALUES_WITH_EXPERTS
    },
    **{
        f"rope_theta {theta}": refused("rope_theta", theta, Folder(config=OLD_ROPE))
        for theta in (None, "1e6", float("nan"), 0, True)
    },
    "rope of null type": (
        Folder(config={"rope_parameters": {"rope_type": None, "type": "default"}}),
        "rope_type .* is None",
    ),
    "rope by layer type": (
        Folder(config={"rope_parameters": {"full_attention": {"rope_type": "default"}}}),
        "rope_parameters .* is {'full_attention'",
    ),
    **{
        f"{family}, {key} {value}": refused(key, value, Folder(family=family))
        for family, key, value in (
            ("llama", "mlp_bias", "yes"),
            ("llama", "layer_types", ["sliding_attention"] * 2),
            ("llama", "quantization_config", {"quant_method": "gptq"}),
            ("llama", "hidden_act", "gelu"),
            ("llama", "num_key_value_heads", 3),
            ("llama", "architectures", ["LlamaForSequenceClassification2"]),
            ("mistral", "sliding_window", "4096"),
            ("qwen2", "layer_types", ["chunked_attention"] * 2),
            ("smollm3", "no_rope_layers", [1]),
            ("smollm3", "no_rope_layers", "all"),
            ("olmo3", "rope_parameters", {FULL: "default"}),
            ("gemma3_text", "final_logit_softcapping", 30.0),
            ("gemma3_text", "attn_logit_softcapping", 50.0),
            ("gemma3_text", "use_bidirectional_attention", True),
            ("gemma3_text", "hidden_activation", "silu"),
            ("glm4", "hidden_act", "gelu"),
            ("gpt_oss", "swiglu_limit", 0),
            ("gpt_oss", "num_experts_per_tok", 200),
            ("gpt_oss", "layer_types", ["full_attention"]),
        )
    },
    "qwen3_next": (
        Folder(config={"model_type": "qwen3_next"}),
        "model_type .* is 'qwen3_next'; its folders interleave",
    ),
    "gemma 3 with vision": (
        Folder(config={"model_type": "gemma3"}),
        "model_type .* is 'gemma3'; Tiller trains no vision",
    ),
    "gemma3_text, no scale": refused("query_pre_attn_scalar", 0, gemma3()),
    **{
        f"glm4, {share} of a head": refused(
            "partial_rotary_factor", share, Folder(family="glm4", config={"rope_parameters": GONE})
        )
        for share in (1.5, 0, 0.1, "0.5")
    },
    "phi3, sequences beyond the original length": (
        replace(
            phi3(rope_parameters=LONGROPE, partial_rotary_factor=0.75),
            config={"original_max_position_embeddings": 512},
        ),
        "original_max_position_embeddings .* is 512; longer sequences rotate in another way; set "
        "model.max_seq_len",
    ),
    "phi3, too few factors": (
        replace(phi3(), config={"rope_parameters": LONGROPE | {"short_factor": [1.0] * 3}}),
        r"short_factor .* is \[1.0, 1.0, 1.0\]; it must be a list of 16 numbers",
    ),
    "phi3, another scaling": (
        replace(phi3(), config={"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
        "rope_type of rope_parameters .* is 'linear'; Tiller trains 'default' or 'longrope'",
    ),
    "gemma2, no bound": refused("attn_logit_softcapping", 0, gemma2()),
    "gemma2, no window": refused(
        "sliding_window", None, replace(gemma2(), config={"layer_types": [FULL] * 4})
    ),
    "olmo3, no window": refused(
        "sliding_window", None, replace(olmo3(), config={"layer_types": GONE})
    ),
    "olmo3, scaled layers with windows": (
        olmo3(rope_parameters={NEAR: {"rope_theta": 5e5, **SCALED}}),
        "rope_type of sliding_attention .* is {'rope_type': 'yarn'",
    ),
    "gpt_oss, quantized": (
        replace(gpt_oss(), config={"quantization_config": {"quant_method": "mxfp4"}}),
        r"quantization_config .* is {'quant_method': 'mxfp4'}; .*Mxfp4Config\(dequantize=True\)",
    ),
    **{
        f"rope_parameters without {key}": (
            Folder(
                family="llama",
                config={"rope_parameters": {"rope_theta": 1e4, **LLAMA3, key: None}},
            ),
            f"{key} of rope_parameters .* is None",
        )
        for key in ("factor", "low_freq_factor", "high_freq_factor")
    },
    "longrope": (
        Folder(config={"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}),
        "rope_type of rope_parameters .* is 'longrope'; Tiller trains 'default' or 'linear'",
    ),
    "yarn with a factor of text": (
        Folder(config=OLD_ROPE | {"rope_scaling": YARN | {"factor": "4"}}),
        "factor of rope_scaling .* is '4'",
    ),
    "half a head rotated, in rope_parameters": (
        Folder(config={"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}}),
        "partial_rotary_factor .* is 0.5",
    ),
    "no model_type": (Folder(config={"model_type": GONE}), "model_type .* is None"),
    "a dtype of no name": (
        Folder(config={"dtype": GONE, "torch_dtype": "bf16"}),
        "dtype .* is 'bf16'",
    ),
    "heads that no group shares": (
        Folder(config={"num_key_value_heads": 3}),
        "num_key_value_heads .* is 3; it must divide num_attention_heads=4",
    ),
    "too many experts a token": (
        Folder(experts=True, config={"num_experts_per_tok": 5}),
        "num_experts_per_tok .* is 5; it must be at most num_experts=4",
    ),
    "a tied model with a head of its own": (
        Folder(TIED, damage=lambda folder: store_head_of_tied(folder, 1.5)),
        "lm_head.weight differs from model.embed_tokens.weight, .* tie_word_embeddings",
    ),
    "a tied model with a head that differs in a row": (
        Folder(TIED, damage=change_a_row_of_the_head),
        "lm_head.weight differs from model.embed_tokens.weight, .* tie_word_embeddings",
    ),
    "a head for the embedding of an untied model": (
        Folder(damage=tensors(model__embed_tokens__weight=None)),
        "lacks model.embed_tokens.weight",
    ),
    "two names of a tensor": (
        Folder(damage=tensors(norm__weight=torch.ones(64))),
        "model.norm.weight is in both",
    ),
    "an unknown type like llama": (
        Folder(family="llama", config={"model_type": "lama"}),
        "model_type .* is 'lama'; .*model.family .*docs/your-model.md; its options fit 'llama'",
    ),
    "an unknown type like a model with experts": (
        Folder(experts=True, config={"model_type": "qwen9"}),
        "model_type .* is 'qwen9'; .* its options fit 'qwen3_moe'",
    ),
    "no head": (Folder(damage=tensors(lm_head__weight=None)), "lacks lm_head.weight"),
    "fewer layers in the file": (
        Folder(config={"num_hidden_layers": 3, "layer_types": GONE}),
        "lacks model.layers.2.* and 10 more",
    ),
    "more layers in the file": (
        Folder(config={"num_hidden_layers": 1, "layer_types": GONE}),
        "holds model.layers.1.* and 10 more, for which the model has no place",
    ),
    "absurdly many experts": (
        Folder(experts=True, config=ABSURD),
        "holds 45 tensors, fewer than num_hidden_layers=1000 times num_experts=65000",
    ),
    "another shape": (
        Folder(damage=tensors(model__norm__weight=torch.ones(65))),
        r"model.safetensors: model.norm.weight is \[65\], the model's is \[64\]",
    ),
    "another vocabulary": (
        Folder(config={"vocab_size": 48}),
        r"model.embed_tokens.weight is \[40, 64\], the model's is \[48, 64\]",
    ),
    "a bias that the config denies": (
        Folder(damage=tensors(**BIASES)),
        r"holds model.layers.0.self_attn.q_proj.bias and 1 more, for which the model has no place",
    ),
    "fp8": (Folder(damage=cast(FP8, UP)), f"model.safetensors: {UP} is F8_E4M3"),
    "integers": (Folder(damage=cast(torch.int8, UP)), f"model.safetensors: {UP} is I8"),
    "truncated": (Folder(damage=truncate), "model.safetensors cannot be read"),
    "garbage": (
        Folder(damage=text(ONE_FILE, "a pointer")),
        "model.safetensors cannot be read",
    ),
    "truncated shard": (shards(truncate), r"model-\d+-of-\d+.safetensors cannot be read"),
    "missing shard": (shards(lose_shard), r"lacks model-\d+-of-\d+.safetensors"),
    "a tensor twice": (
        shards(repeat_tensor),
        "model.norm.weight is in both model-00001-of-.* and model-",
    ),
    "an index out of the folder": (
        shards(weight_map(lambda m: m.update({"model.norm.weight": "../in/x.safetensors"}))),
        "index.json names '../in/x.safetensors'; it must be a file of the folder",
    ),
    "an index of a tensor that is elsewhere": (
        shards(weight_map(lambda m: m.update({"model.norm.weight": m[EMBEDDING]}))),
        "index.json says that model.norm.weight is in model-.*; it is in model-",
    ),
    "an index of nothing": (
        shards(text(INDEX, '{"weight_map": []}')),
        "index.json has no weight_map",
    ),
    "an index that is cut off": (
        shards(text(INDEX, '{"weight_map": {"a": ')),
        "index.json cannot be read",
    ),
    "shards and a single file": (shards(both_forms), "holds both model.safetensors and"),
    "a file of another name": (
        Folder(damage=lambda folder: (folder / ONE_FILE).rename(folder / "weights.safetensors")),
        "has neither model.safetensors nor model.safetensors.index.json",
    ),
    "a folder in place of the file": (
        Folder(damage=lambda folder: ((folder / ONE_FILE).unlink(), (folder / ONE_FILE).mkdir())),
        "has neither model.safetensors nor",
    ),
    "an adapter": (Folder(damage=text("adapter_config.json", "{}")), "adapter_config.json"),
    "a config that is cut off": (
        Folder(damage=text("config.json", '{"model_type": "qwen3",')),
        "config.json cannot be read: Expecting property name",
    ),
    "a config that is a list": (
        Folder(damage=text("config.json", "[1]")),
        "config.json holds a list; it must be a JSON object",
    ),
    "a config that is not text": (
        Folder(damage=lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe\xfa{")),
        "config.json cannot be read",
    ),
}
"""Folders that are refused, and how the message names the key, or the file and tensor."""
