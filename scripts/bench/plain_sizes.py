"""Models of plain_loop.py; both sides read this file."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """Sizes of a model, as fields of rl.model.shape.ModelConfig, and its learning rate."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int
    lr: float


SIZES = {
    "0.1m": Size(64, 2, 2, 2, 32, 192, lr=1e-3),
    "3m": Size(256, 4, 4, 2, 64, 768, lr=3e-4),
}
"""The quickstart's model, and the layers of that of against_trl.py."""
