"""Sizes of the policy, from config fields or from a Hugging Face folder."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from rl.errors import require
from rl.model.hugging_face_config import (
    ARCHITECTURES,
    EXPERT_SIZES,
    QWEN3_NORM_EPS,
    SIZES,
    read_config,
)
from rl.types.rules import PERFORMANCE, NeedsCuda, above, at_least


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """Qwen3, dense or with experts: sizes for random weights, or a Hugging Face folder."""

    hf_path: str | None = None
    """Folder with config.json, safetensors and tokenizer. Its sizes replace the fields below;
    ``max_seq_len`` is the smaller of the two values."""

    vocab_size: Annotated[int, at_least(1, 10**7)] = 32
    """Number of embeddings; at least the tokenizer's size."""

    dim: Annotated[int, at_least(1, 2**20)] = 64
    """Width of the residual stream."""

    n_layers: Annotated[int, at_least(1, 1024)] = 2
    """Number of transformer layers."""

    n_heads: Annotated[int, at_least(1, 4096)] = 2
    """Number of query heads."""

    n_kv_heads: Annotated[int, at_least(1, 4096)] = 2
    """Number of key and value heads; must divide ``n_heads``."""

    head_dim: Annotated[int, at_least(1, 4096)] = 32
    """Width of an attention head."""

    hidden_dim: Annotated[int, at_least(1, 2**24)] = 192
    """Width of the feed-forward layers of a dense model."""

    num_experts: Annotated[int, at_least(0, 2**16)] = 0
    """Number of experts that replace each feed-forward layer; 0 for a dense model."""

    experts_per_token: Annotated[int, at_least(0, 2**16)] = 0
    """Number of experts that each token is routed to. Their router weights sum to 1."""

    moe_hidden_dim: Annotated[int, at_least(0, 2**24)] = 0
    """Width of each expert."""

    tie_embeddings: bool = True
    """Whether the embedding and the output head share one weight."""

    rope_theta: Annotated[float, above(0, 1e15)] = 1e6
    """Base of the frequencies of the rotary position embedding."""

    max_seq_len: Annotated[int, at_least(1, 10**8), PERFORMANCE] = 2048
    """Maximum length of a prompt plus its completion, in tokens."""

    fuse_qkv: bool = True
    """Whether the q, k and v projections share one weight."""

    attention: Annotated[
        Literal["auto", "dense", "varlen", "flex"],
        PERFORMANCE,
        NeedsCuda(("varlen", "flex"), "'auto' or 'dense'"),
    ] = "auto"
    """Attention of the trainer. ``auto`` is dense on CPU, and on CUDA varlen, or flex with context
    parallelism, in float32, or without the FlashAttention package that varlen needs from H100
    on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a model, after ``hf_path`` is read; the names are those of ModelConfig."""

    vocab_size: int
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int
    num_experts: int
    experts_per_token: int
    moe_hidden_dim: int
    tie_embeddings: bool
    rope_theta: float
    max_seq_len: int
    dtype: str
    """Dtype of exported weights: that of the weights the model started from."""


def shape_of(config: ModelConfig, *, field: str = "model.hf_path") -> ModelShape:
    """Return the sizes of the policy, from ``config.json`` if ``hf_path`` is set.

    Raises ConfigError, naming ``field``, if the folder is missing or incomplete, or if its model is
    not a Qwen3 that torchtitan supports.
    """
    if config.hf_path is None:
        names = [each.name for each in fields(ModelShape) if each.name != "dtype"]
        return ModelShape(**{name: getattr(config, name) for name in names}, dtype="float32")
    folder = Path(config.hf_path)
    name = repr(str(folder))
    fix = "name one with a model"
    require(folder.is_dir(), f"there is no folder {name}", field=field, fix=fix)
    require((folder / "config.json").is_file(), f"{name} has no config.json", field=field)
    fix = "save the model with safe_serialization=True"
    has_weights = any(folder.glob("*.safetensors"))
    require(has_weights, f"{name} has no *.safetensors", field=field, fix=fix)
    hf = read_config(field, folder)
    has_experts = hf["model_type"] == "qwen3_moe"
    return ModelShape(
        **{name: hf[key] for name, key in SIZES.items()},
        **{name: hf[key] if has_experts else 0 for name, key in EXPERT_SIZES.items()},
        tie_embeddings=hf["tie_word_embeddings"],
        rope_theta=hf["rope_theta"],
        max_seq_len=min(config.max_seq_len, hf["max_position_embeddings"]),
        dtype=hf["dtype"],
    )


def hf_config(shape: ModelShape) -> dict[str, Any]:
    """Return the ``config.json`` of a Qwen3 of this shape, as transformers and vLLM read it."""
    name = "qwen3_moe" if shape.num_experts else "qwen3"
    kind: dict[str, Any] = {"architectures": [ARCHITECTURES[name]], "model_type": name}
    if shape.num_experts:
        kind |= {
            **{key: getattr(shape, name) for name, key in EXPERT_SIZES.items()},
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return kind | {
        **{key: getattr(shape, name) for name, key in SIZES.items()},
        "tie_word_embeddings": shape.tie_embeddings,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "max_position_embeddings": shape.max_seq_len,
        "rms_norm_eps": QWEN3_NORM_EPS,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "hidden_act": "silu",
        "dtype": shape.dtype,
    }
