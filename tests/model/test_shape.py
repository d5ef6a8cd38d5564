"""Sizes of a model come from its config or its folder, and every size changes the parameters."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from rl.errors import ConfigError
from rl.model.decoder import in_all_layers, parameter_shapes
from rl.model.shape import ModelConfig, shape_of

HF = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
}

MOE = HF | {
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def test_published_configs_are_read_without_importing_transformers(tmp_path):
    """The import takes seconds, which each rank and each plan would spend."""
    folders = [tmp_path / "dense", tmp_path / "experts"]
    for folder, hf in zip(folders, (HF, MOE), strict=True):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(hf))
        (folder / "model.safetensors").touch()
    code = (
        "import sys; from rl.model.shape import ModelConfig, shape_of\n"
        "for path in sys.argv[1:]: shape_of(ModelConfig(hf_path=path))\n"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, *folders], timeout=60, check=True)


def test_the_shorter_of_both_lengths_is_used(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HF | {"max_position_embeddings": 512}))
    (tmp_path / "model.safetensors").touch()
    config = ModelConfig(hf_path=str(tmp_path))
    assert shape_of(config).max_seq_len == 512
    config.max_seq_len = 100
    assert shape_of(config).max_seq_len == 100


def test_an_incomplete_folder_is_refused(tmp_path):
    config = ModelConfig(hf_path=str(tmp_path))
    with pytest.raises(ConfigError, match="model.hf_path: '.*' has no config.json"):
        shape_of(config)
    (tmp_path / "config.json").write_text(json.dumps(HF))
    with pytest.raises(ConfigError, match="model.hf_path: '.*' has no \\*.safetensors"):
        shape_of(config)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ConfigError, match="'.*safetensors' is a pointer of Git LFS.*git lfs pull"):
        shape_of(config)


DENSE = ModelConfig()
MIXTURE = replace(DENSE, num_experts=4, experts_per_token=2, moe_hidden_dim=48)
SIZES = {
    "vocab_size": (DENSE, 64),
    "dim": (DENSE, 96),
    "n_layers": (DENSE, 3),
    "n_heads": (DENSE, 4),
    "n_kv_heads": (DENSE, 1),
    "head_dim": (DENSE, 64),
    "hidden_dim": (DENSE, 128),
    "family": (DENSE, "qwen2"),
    "tie_embeddings": (DENSE, False),
    "fuse_qkv": (DENSE, False),
    "num_experts": (MIXTURE, 8),
    "expert_bias": (MIXTURE, True),
    "moe_hidden_dim": (MIXTURE, 96),
}


@pytest.mark.parametrize("name", SIZES)
def test_every_size_changes_the_parameters(name):
    config, value = SIZES[name]
    before, after = (
        parameter_shapes(shape_of(each), fuse_qkv=each.fuse_qkv)
        for each in (config, replace(config, **{name: value}))
    )
    assert before != after


def test_layers_of_two_kinds_have_the_parameters_of_the_first_layer_of_their_kind():
    shape = replace(shape_of(ModelConfig(n_layers=5)), layers_with_delta_rule=(0, 1, 3))
    assert shape.kinds == (0, 0, 2, 0, 2)
    assert (shape.n_attentions, shape.shortened().n_layers) == (2, 3)
    of_some = {"first": 1, "layers.0.a": 2, "layers.1.a": 3, "layers.2.b": 4, "last": 5}
    layers = {
        f"layers.{n}.{name}": value
        for n, (name, value) in enumerate([("a", 2), ("a", 2), ("b", 4), ("a", 2), ("b", 4)])
    }
    assert [*in_all_layers(of_some, shape.kinds).items()] == [
        ("first", 1),
        *layers.items(),
        ("last", 5),
    ]
