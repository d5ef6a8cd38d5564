"""Model folders with equal meaning, with unsupported values, or with damage."""

import torch

from tests.training.model_folders import (
    GONE,
    INDEX,
    ONE_FILE,
    Folder,
    both_forms,
    cast,
    index_one_shard,
    lose_shard,
    repeat_tensor,
    store_head_of_tied,
    tensors,
    truncate,
    weight_map,
)

OLD_ROPE = {"rope_parameters": GONE, "rope_scaling": None, "rope_theta": 5e5}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
HUB = OLD_ROPE | {
    "dtype": GONE,
    "torch_dtype": "float32",
    "layer_types": GONE,
    "sliding_window": None,
}
BIASES = {
    f"model__layers__{n}__self_attn__{p}__bias": torch.ones(s)
    for n in (0, 1)
    for p, s in (("q_proj", 128),)
}
SMALL_SHARDS = {"max_shard_size": "20KB"}
TIED = {"tie_word_embeddings": True}
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
    "several files": Folder(**SMALL_SHARDS),
    "one file and an index": Folder(damage=index_one_shard),
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

REFUSED: dict[str, tuple[Folder, str]] = {
    "yarn, older key": (
        Folder(config=OLD_ROPE | {"rope_scaling": YARN}),
        "rope_type of rope_scaling .* is 'yarn'",
    ),
    "linear, older key": (
        Folder(config=OLD_ROPE | {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        "rope_type of rope_scaling .* is 'linear'; Tiller trains 'default' only",
    ),
    "dynamic": (
        Folder(
            config={"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 5e5}}
        ),
        "rope_type of rope_parameters .* is 'dynamic'",
    ),
    "yarn before rope_parameters": (
        Folder(config={"rope_scaling": YARN}),
        "rope_scaling .* is 'yarn'",
    ),
    "rope of null type": (
        Folder(config={"rope_parameters": {"rope_type": None, "type": "default"}}),
        "rope_type .* is None",
    ),
    "rope by layer type": (
        Folder(
            config={
                "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e5}}
            }
        ),
        "rope_parameters .* is {'full_attention'",
    ),
    "rope_scaling of text": (
        Folder(config={"rope_scaling": "yarn"}),
        "rope_scaling .* is 'yarn'; it must be",
    ),
    "half a head rotated": (
        Folder(config={"partial_rotary_factor": 0.5}),
        "partial_rotary_factor .* is 0.5",
    ),
    "half a head rotated, in rope_parameters": (
        Folder(config={"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}}),
        "partial_rotary_factor .* is 0.5",
    ),
    **{
        f"rope_theta of {theta}": (
            Folder(config=OLD_ROPE | {"rope_theta": theta}),
            f"rope_theta .* is {theta!r}",
        )
        for theta in (None, "1e6", float("nan"), 0, True)
    },
    "a sliding window": (
        Folder(
            config={
                "use_sliding_window": True,
                "sliding_window": 4,
                "max_window_layers": 0,
                "layer_types": GONE,
            }
        ),
        "use_sliding_window .* is True",
    ),
    "sliding layers": (
        Folder(config={"layer_types": ["full_attention", "sliding_attention"]}),
        r"layer_types .* is \['full_attention', 'sliding_attention'\]",
    ),
    "too many layer_types": (Folder(config={"layer_types": ["full_attention"] * 3}), "layer_types"),
    "attention_bias": (
        Folder({"attention_bias": True}),
        "attention_bias .* is True; Tiller trains False only",
    ),
    "attention_dropout": (Folder(config={"attention_dropout": 0.1}), "attention_dropout .* is 0.1"),
    "hidden_act": (Folder(config={"hidden_act": "gelu"}), "hidden_act .* is 'gelu'"),
    "rms_norm_eps": (Folder(config={"rms_norm_eps": 1e-5}), "rms_norm_eps .* is 1e-05"),
    "quantization": (
        Folder(config={"quantization_config": {"quant_method": "fp8"}}),
        "quantization_config .* is {'quant_method': 'fp8'}",
    ),
    "dual chunks": (
        Folder(config={"dual_chunk_attention_config": {"chunk_size": 8}}),
        "dual_chunk_attention_config",
    ),
    "quantization, older key": (
        Folder(config={"compression_config": {"format": "int"}}),
        "compression_config",
    ),
    "another file of configs": (
        Folder(config={"configuration_files": ["config.4.json"]}),
        "configuration_files",
    ),
    "layers that differ": (
        Folder(config={"per_layer_config": {"0": {"hidden_act": "gelu"}}}),
        "per_layer_config",
    ),
    "bidirectional": (Folder(config={"is_causal": False}), "is_causal .* is False"),
    "code of its own": (Folder(config={"auto_map": {"AutoModelForCausalLM": "m.M"}}), "auto_map"),
    "weights elsewhere": (
        Folder(config={"transformers_weights": "other.safetensors"}),
        "transformers_weights",
    ),
    "a classifier": (
        Folder(config={"architectures": ["Qwen3ForSequenceClassification"]}),
        r"architectures .* is \['Qwen3ForSequenceClassification'\]",
    ),
    "another model": (Folder(config={"model_type": "llama"}), "model_type .* is 'llama'"),
    "no model_type": (Folder(config={"model_type": GONE}), "model_type .* is None"),
    "a dtype of 8 bits": (Folder(config={"dtype": "float8_e4m3fn"}), "dtype .* is 'float8_e4m3fn'"),
    "a dtype of no name": (
        Folder(config={"dtype": GONE, "torch_dtype": "bf16"}),
        "dtype .* is 'bf16'",
    ),
    "a size in quotes": (
        Folder(config={"hidden_size": "64"}),
        "hidden_size .* is '64'; it must be a whole number",
    ),
    "a size with a point": (
        Folder(config={"num_hidden_layers": 2.0}),
        "num_hidden_layers .* is 2.0",
    ),
    "no layers": (Folder(config={"num_hidden_layers": 0}), "num_hidden_layers .* is 0"),
    "head_dim of null": (Folder(config={"head_dim": None}), "head_dim .* is None"),
    "tied or not": (Folder(config={"tie_word_embeddings": 1}), "tie_word_embeddings .* is 1"),
    "heads that no group shares": (
        Folder(config={"num_key_value_heads": 3}),
        "num_key_value_heads .* is 3; it must divide num_attention_heads=4",
    ),
    "unnormalised experts": (
        Folder(experts=True, config={"norm_topk_prob": GONE}),
        "norm_topk_prob .* is False",
    ),
    "every second layer": (
        Folder(experts=True, config={"decoder_sparse_step": 2}),
        "decoder_sparse_step .* is 2",
    ),
    "a dense layer": (
        Folder(experts=True, config={"mlp_only_layers": [0]}),
        r"mlp_only_layers .* is \[0\]",
    ),
    "a shared expert": (
        Folder(experts=True, config={"shared_expert_intermediate_size": 24}),
        "shared_expert_intermediate_size .* is 24",
    ),
    "too many experts a token": (
        Folder(experts=True, config={"num_experts_per_tok": 5}),
        "num_experts_per_tok .* is 5; it must be at most num_experts=4",
    ),
    "experts, key-value heads of null": (
        Folder(experts=True, config={"num_key_value_heads": None}),
        "num_key_value_heads .* is None",
    ),
    "a tied model with a head of its own": (
        Folder(TIED, damage=lambda folder: store_head_of_tied(folder, 1.5)),
        "lm_head.weight differs from model.embed_tokens.weight, .* tie_word_embeddings",
    ),
    "no head": (
        Folder(damage=tensors(lm_head__weight=None)),
        "lacks lm_head.weight",
    ),
    "fewer layers in the file": (
        Folder(config={"num_hidden_layers": 3, "layer_types": GONE}),
        "lacks model.layers.2.* and 10 more",
    ),
    "more layers in the file": (
        Folder(config={"num_hidden_layers": 1, "layer_types": GONE}),
        "holds model.layers.1.* and 10 more, for which the model has no place",
    ),
    "absurdly many experts": (
        Folder(
            experts=True,
            config={"num_hidden_layers": 1000, "num_local_experts": 65_000, "layer_types": GONE},
        ),
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
    "fp8": (
        Folder(damage=cast(FP8, "model.layers.0.mlp.up_proj.weight")),
        r"model.safetensors: model.layers.0.mlp.up_proj.weight is F8_E4M3",
    ),
    "integers": (
        Folder(damage=cast(torch.int8, "model.layers.0.mlp.up_proj.weight")),
        r"model.safetensors: model.layers.0.mlp.up_proj.weight is I8",
    ),
    "truncated": (Folder(damage=truncate), "model.safetensors cannot be read"),
    "truncated shard": (
        Folder(**SMALL_SHARDS, damage=truncate),
        r"model-\d+-of-\d+.safetensors cannot be read",
    ),
    "garbage": (
        Folder(
            damage=lambda folder: (folder / ONE_FILE).write_bytes(
                b"version https://git-lfs.github.com/spec/v1\n"
            )
        ),
        "model.safetensors cannot be read",
    ),
    "missing shard": (
        Folder(**SMALL_SHARDS, damage=lose_shard),
        r"lacks model-\d+-of-\d+.safetensors",
    ),
    "a tensor twice": (
        Folder(**SMALL_SHARDS, damage=repeat_tensor),
        "model.norm.weight is in both model-00001-of-.* and model-",
    ),
    "an index out of the folder": (
        Folder(
            **SMALL_SHARDS,
            damage=weight_map(lambda m: m.update({"model.norm.weight": "../in/x.safetensors"})),
        ),
        "index.json names '../in/x.safetensors'; it must be a file of the folder",
    ),
    "an index of nothing": (
        Folder(
            **SMALL_SHARDS, damage=lambda folder: (folder / INDEX).write_text('{"weight_map": []}')
        ),
        "index.json has no weight_map",
    ),
    "an index that is cut off": (
        Folder(
            **SMALL_SHARDS,
            damage=lambda folder: (folder / INDEX).write_text('{"weight_map": {"a": '),
        ),
        "index.json cannot be read",
    ),
    "an index of a tensor that is elsewhere": (
        Folder(
            **SMALL_SHARDS,
            damage=weight_map(
                lambda m: m.update({"model.norm.weight": m["model.embed_tokens.weight"]})
            ),
        ),
        "index.json says that model.norm.weight is in model-.*; it is in model-",
    ),
    "shards and a single file": (
        Folder(**SMALL_SHARDS, damage=both_forms),
        "holds both model.safetensors and",
    ),
    "a file of another name": (
        Folder(damage=lambda folder: (folder / ONE_FILE).rename(folder / "weights.safetensors")),
        "has neither model.safetensors nor model.safetensors.index.json",
    ),
    "a folder in place of the file": (
        Folder(damage=lambda folder: ((folder / ONE_FILE).unlink(), (folder / ONE_FILE).mkdir())),
        "has neither model.safetensors nor",
    ),
    "an adapter": (
        Folder(damage=lambda folder: (folder / "adapter_config.json").write_text("{}")),
        "adapter_config.json",
    ),
    "a config that is cut off": (
        Folder(
            damage=lambda folder: (folder / "config.json").write_text('{"model_type": "qwen3",')
        ),
        "config.json cannot be read: Expecting property name",
    ),
    "a config that is a list": (
        Folder(damage=lambda folder: (folder / "config.json").write_text("[1]")),
        "config.json holds a list; it must be a JSON object",
    ),
    "a config that is no text": (
        Folder(damage=lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe\xfa{")),
        "config.json cannot be read",
    ),
}
"""Folders that are refused, and how the message names the key, or the file and tensor."""
