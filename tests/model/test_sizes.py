"""Every size of a model's config changes its parameters."""

from dataclasses import replace

import pytest

from rl.model.qwen3 import parameter_shapes
from rl.model.shape import ModelConfig, shape_of

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
    "tie_embeddings": (DENSE, False),
    "fuse_qkv": (DENSE, False),
    "num_experts": (MIXTURE, 8),
    "moe_hidden_dim": (MIXTURE, 96),
}


@pytest.mark.parametrize("name", SIZES)
def test_every_size_changes_the_parameters(name):
    config, value = SIZES[name]
    found = []
    for each in (config, replace(config, **{name: value})):
        shapes = parameter_shapes(shape_of(each), fuse_qkv=each.fuse_qkv)
        tied = shape_of(each).tie_embeddings
        found.append((tied, shapes))
    assert found[0] != found[1]
    assert name == "tie_embeddings" or found[0][1] != found[1][1]
