"""A Hugging Face folder that Tiller cannot train is refused, naming the field and its value."""

import json
import subprocess
import sys

import pytest
from transformers import AutoConfig, Qwen3MoeConfig

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


@pytest.fixture
def write(tmp_path):
    """Write a folder with ``HF`` or the given config, and changes; return its ModelConfig."""

    def writes(hf=HF, **changes):
        (tmp_path / "config.json").write_text(json.dumps(hf | changes))
        (tmp_path / "model.safetensors").write_bytes(b"")
        return ModelConfig(hf_path=str(tmp_path))

    return writes


def test_sizes_come_from_the_folder(write):
    shape = shape_of(write())
    assert (shape.vocab_size, shape.dim, shape.n_layers, shape.hidden_dim) == (
        151936,
        1024,
        28,
        3072,
    )
    assert (shape.n_heads, shape.n_kv_heads, shape.head_dim) == (16, 8, 128)
    assert (shape.tie_embeddings, shape.rope_theta, shape.dtype) == (True, 1e6, "bfloat16")


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


def test_a_dense_model_has_no_experts(write):
    shape = shape_of(write())
    assert (shape.num_experts, shape.experts_per_token, shape.moe_hidden_dim) == (0, 0, 0)


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_experts_come_from_the_folder(write, name):
    """The Hub's folders have one name for their number, transformers 5 writes another."""
    hf = {name if key == "num_experts" else key: value for key, value in MOE.items()}
    shape = shape_of(write(hf))
    assert (shape.num_experts, shape.experts_per_token, shape.moe_hidden_dim) == (128, 8, 768)
    assert shape.hidden_dim == 3072


def test_newer_names_for_rope_and_dtype_are_read(write):
    shape = shape_of(
        write(
            rope_theta=1,
            rope_parameters={"rope_theta": 5e5, "rope_type": "default"},
            dtype="float32",
        )
    )
    assert (shape.rope_theta, shape.dtype) == (5e5, "float32")


def test_the_shorter_of_both_lengths_is_used(write):
    config = write(max_position_embeddings=512)
    assert shape_of(config).max_seq_len == 512
    config.max_seq_len = 100
    assert shape_of(config).max_seq_len == 100


EXPERTS = {"num_experts": 6, "experts_per_token": 2, "moe_hidden_dim": 20}


@pytest.mark.parametrize("experts", [{}, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_written_config_is_read_back(tmp_path, tied, experts):
    config = ModelConfig(
        vocab_size=48,
        dim=24,
        n_heads=3,
        n_kv_heads=1,
        tie_embeddings=tied,
        rope_theta=1e4,
        **experts,
    )
    shape = shape_of(config)
    (tmp_path / "config.json").write_text(json.dumps(hf_config(shape)))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert shape_of(ModelConfig(hf_path=str(tmp_path))) == shape


def test_transformers_reads_a_written_mixture_as_it_is_meant(tmp_path):
    shape = shape_of(ModelConfig(**EXPERTS))
    (tmp_path / "config.json").write_text(json.dumps(hf_config(shape)))
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, Qwen3MoeConfig)
    assert (config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size) == (
        6,
        2,
        20,
    )
    assert (config.norm_topk_prob, config.decoder_sparse_step, config.mlp_only_layers) == (
        True,
        1,
        [],
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "llama"},
            "model_type in .*config.json is 'llama'; Tiller trains 'qwen3' or 'qwen3_moe' only",
        ),
        ({"hidden_act": "gelu"}, "hidden_act .* is 'gelu'; Tiller trains 'silu' only"),
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
def test_models_that_torchtitans_qwen3_does_not_support_are_refused(write, changes, message):
    with pytest.raises(ConfigError, match=f"model.hf_path: {message}"):
        shape_of(write(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob .* is False; Tiller trains True only"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step .* is 2; Tiller trains 1 only"),
        ({"mlp_only_layers": [0, 3]}, r"mlp_only_layers .* is \[0, 3\]; Tiller trains \[\] only"),
        (
            {"shared_expert_intermediate_size": 512},
            "shared_expert_intermediate_size .* is 512; Tiller trains 0 only",
        ),
    ],
)
def test_mixtures_that_torchtitans_qwen3_does_not_support_are_refused(write, changes, message):
    with pytest.raises(ConfigError, match=f"model.hf_path: {message}"):
        shape_of(write(MOE, **changes))


def test_transformers_own_default_is_refused(write):
    """The default does not renormalise; every published Qwen3 does."""
    with pytest.raises(ConfigError, match="norm_topk_prob .* is False"):
        shape_of(write({key: value for key, value in MOE.items() if key != "norm_topk_prob"}))


def test_a_folder_that_is_missing_or_incomplete_is_refused(tmp_path):
    config = ModelConfig(hf_path=str(tmp_path / "nowhere"))
    with pytest.raises(
        ConfigError, match="model.hf_path: there is no folder '.*nowhere'; name one"
    ):
        shape_of(config)
    (tmp_path / "nowhere").mkdir()
    with pytest.raises(ConfigError, match="model.hf_path: '.*nowhere' has no config.json"):
        shape_of(config)
    (tmp_path / "nowhere" / "config.json").write_text(json.dumps(HF))
    with pytest.raises(ConfigError, match="model.hf_path: '.*nowhere' has no \\*.safetensors"):
        shape_of(config)
