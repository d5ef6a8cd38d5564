"""Qwen2.5 in the sizes that people train, for nodes of eight H100s: --model.hf_path DIR
--task.path FILE.
"""

from typing import Any

from rl.config import RLConfig
from rl.model.shape import ModelConfig

from ._h100 import COMPLETION, PROMPT, on_h100s


def qwen2_5_1_5b() -> RLConfig:
    """Qwen2.5-1.5B on one node: four GPUs train, four generate."""
    model = _qwen2(
        vocab_size=151_936, dim=1536, n_layers=28, n_heads=12, n_kv_heads=2, hidden_dim=8960
    )
    return on_h100s(model, shard=4, replicas=4, recompute=None)  # 39 of 79 GiB


def qwen2_5_7b() -> RLConfig:
    """Qwen2.5-7B on one node: four GPUs train, four generate."""
    return on_h100s(_qwen2_5_7b(), shard=4, replicas=4)


def qwen2_5_7b_2_nodes() -> RLConfig:
    """Qwen2.5-7B on two nodes: one trains, one generates."""
    return on_h100s(_qwen2_5_7b(), shard=8, replicas=8, own_nodes=1)


def qwen2_5_14b() -> RLConfig:
    """Qwen2.5-14B on two nodes: one trains, one generates."""
    model = _qwen2(
        vocab_size=152_064,
        dim=5120,
        n_layers=48,
        n_heads=40,
        n_kv_heads=8,
        hidden_dim=13_824,
        tie_embeddings=False,
    )
    return on_h100s(model, shard=8, replicas=8, own_nodes=1)


def _qwen2_5_7b() -> ModelConfig:
    return _qwen2(
        vocab_size=152_064,
        dim=3584,
        n_layers=28,
        n_heads=28,
        n_kv_heads=4,
        hidden_dim=18_944,
        tie_embeddings=False,
    )


def _qwen2(**sizes: Any) -> ModelConfig:
    """Return a model with the fields that all sizes share; ``model.hf_path`` replaces them."""
    return ModelConfig(
        family="qwen2",
        head_dim=128,
        max_seq_len=PROMPT + COMPLETION,
        **sizes,
    )
