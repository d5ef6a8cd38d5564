"""Attention of documents and their branches on CPU is that of a dense mask."""

import pytest
import torch

from rl.training.attention import DenseAttention, dense_tree_mask
from rl.training.documents import Documents, _groups

ROWS = {
    "documents": [[300, 90, 10], [150, 250], [398, 1, 1]],
    "a long document": [[600, 100, 20]],
    "equal documents": [[9, 9, 9], [9, 9, 9]],
    # each inner list has the cells of a prompt, then of its branches
    "branches": [[[4, 6, 5, 1], [3, 9], 12], [[1, 1, 1], 37]],
    "long branches": [[[520, 30, 40, 530]]],
}


def positions_of(rows) -> torch.Tensor:
    return torch.stack([torch.cat([_positions(piece) for piece in row]) for row in rows])


def _positions(piece: int | list[int]) -> torch.Tensor:
    if isinstance(piece, int):
        return torch.arange(piece)
    prompt, *branches = piece
    ends = [torch.arange(prompt, prompt + length) for length in branches]
    return torch.cat([torch.arange(prompt), *ends])


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_documents_attend_as_with_a_dense_mask(rows, kv_heads):
    positions = positions_of(rows)
    draw = torch.Generator().manual_seed(0)
    shape = (*positions.shape, 4, 16)
    qkv = [
        torch.randn(*shape[:2], heads, 16, generator=draw, dtype=torch.float64, requires_grad=True)
        for heads in (4, kv_heads, kv_heads)
    ]
    weights = torch.randn(shape, generator=draw, dtype=torch.float64)
    layer = DenseAttention(DenseAttention.Config())
    results = []
    for masks in (Documents(positions), dense_tree_mask(positions, 0)):
        out = layer(*qkv, attention_masks=masks, scale=0.3, enable_gqa=kv_heads < 4)
        results.append([out, *torch.autograd.grad((out * weights).sum(), qkv)])
    for own, wanted in zip(*results, strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "rows", [[[100, 90, 10]], [[[40, 60, 50, 10]]]], ids=["documents", "branches"]
)
def test_gradients_of_short_documents_in_bfloat16_are_only_rounded(rows):
    positions = positions_of(rows)
    draw = torch.Generator().manual_seed(0)
    exact = [
        torch.randn(*positions.shape, heads, 64, generator=draw).bfloat16().double()
        for heads in (9, 3, 3, 9)
    ]
    by = []
    for dtype in (torch.bfloat16, torch.float64):
        *qkv, weights = (each.to(dtype).requires_grad_() for each in exact)
        by.append(torch.autograd.grad(Documents(positions).attend(qkv, None), qkv, weights))
    for own, wanted in zip(*by, strict=True):
        assert (own - wanted).norm() < 2.5e-3 * wanted.norm()  # rounding alone is 1.7e-3


def test_the_kernel_of_documents_follows_the_rules_of_operators():
    positions = positions_of(ROWS["branches"])
    qkv = [torch.randn(*positions.shape, heads, 16, requires_grad=True) for heads in (4, 2, 2)]
    for options in ((False, 0, None), (True, 3, torch.ones(qkv[0].shape[2]))):
        given = (*qkv, positions, 0.25, *options)
        torch.library.opcheck(torch.ops.tiller.attend.default, given)


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        ([[9]] * 256, [256]),
        ([[12, 9, 8, 4]], [4]),
        ([[100, 99, 90]], [2, 1]),
        ([[512, 512, 520, 520]], [1, 1, 2]),
        # the prompt with its first branch, and the others
        ([[[16, *[32] * 8]]], [1, 7]),
    ],
)
def test_pieces_of_similar_lengths_are_computed_together(rows, sizes):
    groups = _groups(positions_of(rows).numpy().tobytes(), torch.float32)
    assert [group.pieces for group in groups] == sizes
