"""Llama 3.1 and 3.2 in the sizes that people train, for nodes of eight H100s: --model.hf_path DIR
--task.path FILE.
"""

from typing import Any

from rl.config import RLConfig
from rl.model.shape import ModelConfig

from ._h100 import COMPLETION, PROMPT, on_h100s


def llama3_2_1b() -> RLConfig:
    """Llama-3.2-1B on one node: two GPUs train, six generate."""
    model = _llama(dim=2048, n_layers=16, n_heads=32, head_dim=64, hidden_dim=8192)
    return on_h100s(model, shard=2, replicas=6, recompute=None)  # 33 of 79 GiB


def llama3_2_3b() -> RLConfig:
    """Llama-3.2-3B on one node: four GPUs train, four generate."""
    model = _llama(dim=3072, n_layers=28, n_heads=24, head_dim=128, hidden_dim=8192)
    return on_h100s(model, shard=4, replicas=4, recompute=None)  # 59 of 79 GiB


def llama3_1_8b() -> RLConfig:
    """Llama-3.1-8B on one node: four GPUs train, four generate."""
    return on_h100s(_llama3_1_8b(), shard=4, replicas=4)


def llama3_1_8b_2_nodes() -> RLConfig:
    """Llama-3.1-8B on two nodes: one trains, one generates."""
    return on_h100s(_llama3_1_8b(), shard=8, replicas=8, own_nodes=1)


def _llama3_1_8b() -> ModelConfig:
    return _llama(
        dim=4096, n_layers=32, n_heads=32, head_dim=128, hidden_dim=14_336, tie_embeddings=False
    )


def _llama(**sizes: Any) -> ModelConfig:
    """Return a model with the fields that all sizes share; ``model.hf_path`` replaces them."""
    return ModelConfig(
        family="llama",
        vocab_size=128_256,
        n_kv_heads=8,
        rope_theta=5e5,
        max_seq_len=PROMPT + COMPLETION,
        **sizes,
    )
