"""How large the policy is, from config fields or from a Hugging Face folder."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rl.errors import ConfigError

QWEN3_NORM_EPS = 1e-6


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """A dense Qwen3: random weights of the given sizes, or a Hugging Face folder."""

    hf_path: str | None = None
    """Folder with config.json, safetensors and tokenizer. Its sizes replace the fields below."""

    vocab_size: int = 32
    """Embeddings; at least the tokenizer's size."""

    dim: int = 64
    """Width of the residual stream."""

    n_layers: int = 2
    n_heads: int = 2
    """Query heads."""

    n_kv_heads: int = 2
    """Key and value heads; divides n_heads."""

    head_dim: int = 32
    hidden_dim: int = 192
    """Width of the feed-forward layers."""

    tie_embeddings: bool = True
    """Whether the embedding and the output head share one weight."""

    rope_theta: float = 1e6

    max_seq_len: int = 2048
    """Longest prompt plus completion, in tokens."""

    fuse_qkv: bool = True
    """One weight for the q, k and v projections."""

    attention: Literal["auto", "dense", "varlen", "flex"] = "auto"
    """Trainer's attention. auto: dense on CPU; varlen on CUDA, or flex under context parallelism."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes that a ModelConfig comes to."""

    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int
    tie_embeddings: bool
    rope_theta: float
    max_seq_len: int
    dtype: str
    """Transfer and export dtype of the weights the model started from."""


def shape_of(config: ModelConfig) -> ModelShape:
    """Sizes of the policy; reads ``config.json`` where ``hf_path`` is set.

    Raises ConfigError for a folder that is missing, incomplete or not a dense Qwen3.
    """
    if config.hf_path is None:
        return ModelShape(
            vocab_size=config.vocab_size,
            dim=config.dim,
            n_layers=config.n_layers,
            n_heads=config.n_heads,
            n_kv_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            hidden_dim=config.hidden_dim,
            tie_embeddings=config.tie_embeddings,
            rope_theta=config.rope_theta,
            max_seq_len=config.max_seq_len,
            dtype="float32",
        )
    hf = read_hf_config(config.hf_path)
    heads = hf["num_attention_heads"]
    rope = hf.get("rope_parameters") or {}
    return ModelShape(
        vocab_size=hf["vocab_size"],
        dim=hf["hidden_size"],
        n_layers=hf["num_hidden_layers"],
        n_heads=heads,
        n_kv_heads=hf.get("num_key_value_heads", heads),
        head_dim=hf.get("head_dim", hf["hidden_size"] // heads),
        hidden_dim=hf["intermediate_size"],
        tie_embeddings=hf.get("tie_word_embeddings", False),
        rope_theta=rope.get("rope_theta", hf.get("rope_theta", 1e6)),
        max_seq_len=min(config.max_seq_len, hf["max_position_embeddings"]),
        dtype=hf.get("dtype") or hf.get("torch_dtype") or "float32",
    )


def read_hf_config(hf_path: str) -> dict:
    """``config.json`` of a Hugging Face Qwen3 folder, checked for what torchtitan's Qwen3 can be."""
    folder = Path(hf_path)
    if not folder.is_dir():
        raise ConfigError(
            f"model.hf_path: there is no folder {hf_path!r}; name one with config.json, *.safetensors and a tokenizer"
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.hf_path: {hf_path!r} has no config.json; is it a Hugging Face model folder?")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"model.hf_path: {hf_path!r} has no *.safetensors; save the model with safe_serialization=True"
        )
    hf = json.loads((folder / "config.json").read_text())
    rope_type = (hf.get("rope_parameters") or hf.get("rope_scaling") or {}).get("rope_type", "default")
    required = {
        "model_type": (hf.get("model_type"), "qwen3"),
        "rms_norm_eps": (hf.get("rms_norm_eps", QWEN3_NORM_EPS), QWEN3_NORM_EPS),
        "attention_bias": (hf.get("attention_bias", False), False),
        "use_sliding_window": (hf.get("use_sliding_window", False), False),
        "rope_type": (rope_type, "default"),
    }
    for name, (value, allowed) in required.items():
        if value != allowed:
            raise ConfigError(
                f"model.hf_path: {name} in {folder / 'config.json'} is {value!r}; Tiller trains {allowed!r} only"
            )
    return hf


def hf_config(shape: ModelShape) -> dict:
    """``config.json`` of a Qwen3 of this shape, as transformers and vLLM read it."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.dim,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.hidden_dim,
        "tie_word_embeddings": shape.tie_embeddings,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "max_position_embeddings": shape.max_seq_len,
        "rms_norm_eps": QWEN3_NORM_EPS,
        "attention_bias": False,
        "hidden_act": "silu",
        "dtype": shape.dtype,
    }
