"""A Hugging Face folder that Tiller cannot train is refused, naming the field and its value."""

import json

import pytest

from rl.errors import ConfigError
from rl.model.shape import ModelConfig, hf_config, shape_of

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
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def write(tmp_path):
    """Writes a folder with ``HF`` and the given changes; returns its ModelConfig."""

    def writes(**changes):
        (tmp_path / "config.json").write_text(json.dumps(HF | changes))
        (tmp_path / "model.safetensors").write_bytes(b"")
        return ModelConfig(hf_path=str(tmp_path))

    return writes


def test_sizes_come_from_the_folder(write):
    shape = shape_of(write())
    assert (shape.vocab_size, shape.dim, shape.n_layers, shape.hidden_dim) == (151936, 1024, 28, 3072)
    assert (shape.n_heads, shape.n_kv_heads, shape.head_dim) == (16, 8, 128)
    assert (shape.tie_embeddings, shape.rope_theta, shape.dtype) == (True, 1e6, "bfloat16")


def test_newer_names_for_rope_and_dtype_are_read(write):
    shape = shape_of(write(rope_theta=1, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}, dtype="float32"))
    assert (shape.rope_theta, shape.dtype) == (5e5, "float32")


def test_the_shorter_of_both_lengths_holds(write):
    config = write(max_position_embeddings=512)
    assert shape_of(config).max_seq_len == 512
    config.max_seq_len = 100
    assert shape_of(config).max_seq_len == 100


@pytest.mark.parametrize("tied", [True, False])
def test_a_written_config_is_read_back(tmp_path, tied):
    shape = shape_of(ModelConfig(vocab_size=48, dim=24, n_heads=3, n_kv_heads=1, tie_embeddings=tied, rope_theta=1e4))
    (tmp_path / "config.json").write_text(json.dumps(hf_config(shape)))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert shape_of(ModelConfig(hf_path=str(tmp_path))) == shape


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type in .*config.json is 'llama'; Tiller trains 'qwen3' only"),
        ({"model_type": "qwen3_moe"}, "model_type .* is 'qwen3_moe'"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps .* is 1e-05; Tiller trains 1e-06 only"),
        ({"attention_bias": True}, "attention_bias .* is True; Tiller trains False only"),
        ({"use_sliding_window": True}, "use_sliding_window .* is True"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_type .* is 'yarn'; Tiller trains 'default' only",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_type .* is 'linear'"),
    ],
)
def test_what_torchtitans_qwen3_cannot_be_is_refused(write, changes, message):
    with pytest.raises(ConfigError, match=f"model.hf_path: {message}"):
        shape_of(write(**changes))


def test_a_folder_that_is_missing_or_incomplete_is_refused(tmp_path):
    config = ModelConfig(hf_path=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="model.hf_path: there is no folder '.*nowhere'; name one"):
        shape_of(config)
    (tmp_path / "nowhere").mkdir()
    with pytest.raises(ConfigError, match="model.hf_path: '.*nowhere' has no config.json"):
        shape_of(config)
    (tmp_path / "nowhere" / "config.json").write_text(json.dumps(HF))
    with pytest.raises(ConfigError, match="model.hf_path: '.*nowhere' has no \\*.safetensors"):
        shape_of(config)
