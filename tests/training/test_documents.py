"""Attention of packed documents on CPU, one after the other, is that of a dense mask."""

import pytest
import torch

from rl.training.attention import DenseAttention, Documents, dense_mask


def positions_of(rows: list[list[int]]) -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_documents_attend_as_with_a_dense_mask(kv_heads):
    positions = positions_of([[300, 90, 10], [150, 250], [398, 1, 1]])
    documents = Documents.of(positions)
    assert documents.lengths == [300, 90, 10, 150, 250, 398, 1, 1]
    draw = torch.Generator().manual_seed(0)
    qkv = [
        torch.randn(3, 400, heads, 16, generator=draw, dtype=torch.float64, requires_grad=True)
        for heads in (4, kv_heads, kv_heads)
    ]
    weights = torch.randn(3, 400, 4, 16, generator=draw, dtype=torch.float64)
    layer = DenseAttention(DenseAttention.Config())
    results = []
    for masks in (documents, dense_mask(positions)):
        out = layer(*qkv, attention_masks=masks, scale=0.3, enable_gqa=kv_heads < 4)
        results.append([out, *torch.autograd.grad((out * weights).sum(), qkv)])
    for own, wanted in zip(*results, strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("rows", "split"),
    [
        ([[9]] * 256, False),
        ([[6, 3]] * 100, False),
        ([[300]] * 4, False),
        ([[170, 170, 172]] * 2, True),
        ([[64] * 16], True),
        ([[2048]], True),
    ],
)
def test_documents_are_computed_alone_if_that_saves_more_than_its_calls_cost(rows, split):
    assert (Documents.of(positions_of(rows)) is not None) == split
