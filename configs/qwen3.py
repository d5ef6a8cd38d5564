"""Qwen3 in the sizes that people train, for nodes of eight H100s: --model.hf_path DIR --task.path
FILE.
"""

from dataclasses import replace
from typing import Any

from torchtitan.distributed.activation_checkpoint import FullAC

from rl.config import RLConfig
from rl.model.shape import ModelConfig

from ._h100 import COMPLETION, PROMPT, on_h100s


def qwen3_0_6b() -> RLConfig:
    """Qwen3-0.6B on one node: two GPUs train, six generate."""
    model = _qwen3(dim=1024, n_layers=28, n_heads=16, hidden_dim=3072, tie_embeddings=True)
    return on_h100s(model, shard=2, replicas=6, recompute=None)  # 29 of 79 GiB


def qwen3_1_7b() -> RLConfig:
    """Qwen3-1.7B on one node: four GPUs train, four generate."""
    model = _qwen3(dim=2048, n_layers=28, n_heads=16, hidden_dim=6144, tie_embeddings=True)
    return on_h100s(model, shard=4, replicas=4, recompute=None)  # 41 of 79 GiB


def qwen3_8b() -> RLConfig:
    """Qwen3-8B on one node: four GPUs train, four generate."""
    return on_h100s(_qwen3_8b(), shard=4, replicas=4)


def qwen3_8b_2_nodes() -> RLConfig:
    """Qwen3-8B on two nodes: one trains, one generates."""
    return on_h100s(_qwen3_8b(), shard=8, replicas=8, own_nodes=1)


def qwen3_14b() -> RLConfig:
    """Qwen3-14B on two nodes: one trains, one generates."""
    return on_h100s(_qwen3_14b(), shard=8, replicas=8, own_nodes=1)


def qwen3_14b_4_nodes() -> RLConfig:
    """Qwen3-14B on four nodes: two train, two generate."""
    return on_h100s(_qwen3_14b(), nodes=2, shard=16, replicas=16, own_nodes=2)


def qwen3_30b_a3b() -> RLConfig:
    """Qwen3-30B-A3B on four nodes: two train, with experts divided within a node, two generate."""
    return _with_experts(replicas=8, own_nodes=2)


def qwen3_30b_a3b_8_nodes() -> RLConfig:
    """Qwen3-30B-A3B on eight nodes: two train, with experts divided within a node, six generate."""
    return _with_experts(replicas=24, own_nodes=6)


def _with_experts(**generators: int) -> RLConfig:
    """Return a recipe for Qwen3-30B-A3B. Its trainer waits for the generators; what experts
    exchange, which only full recomputation drops, is 24 GiB.
    """
    model = _qwen3_30b_a3b()
    return on_h100s(model, nodes=2, shard=16, experts=8, tp=2, recompute=FullAC, **generators)


def _qwen3_8b() -> ModelConfig:
    return _qwen3(dim=4096, n_layers=36, n_heads=32, hidden_dim=12288)


def _qwen3_14b() -> ModelConfig:
    return _qwen3(dim=5120, n_layers=40, n_heads=40, hidden_dim=17408)


def _qwen3_30b_a3b() -> ModelConfig:
    dense = _qwen3(dim=2048, n_layers=48, n_heads=32, hidden_dim=6144)
    return replace(dense, n_kv_heads=4, num_experts=128, experts_per_token=8, moe_hidden_dim=768)


def _qwen3(*, tie_embeddings: bool = False, **sizes: Any) -> ModelConfig:
    """Return a model with the fields that all sizes share; ``model.hf_path`` replaces them."""
    return ModelConfig(
        vocab_size=151_936,
        n_kv_heads=8,
        head_dim=128,
        tie_embeddings=tie_embeddings,
        max_seq_len=PROMPT + COMPLETION,
        **sizes,
    )
