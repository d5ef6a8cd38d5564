"""A batch is divided into parts of similar size, and its sequences are selected by number."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl.types import Batch


def batch_of(lengths: list[int], together: int = 1) -> Batch:
    """Every token is its own place in the batch."""
    return Batch(
        tokens=torch.arange(sum(lengths)),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        loss_weights=torch.zeros(sum(lengths)),
        together=together,
    )


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 8), st.integers(1, 3))
def test_ranks_get_similar_numbers_of_sequences_and_none_is_lost(lengths, parts, together):
    lengths = lengths[: len(lengths) // together * together]
    shares = batch_of(lengths, together).shares(parts)
    assert sorted(sequence for share in shares for sequence in share) == list(range(len(lengths)))
    assert max(map(len, shares)) == -(-len(lengths) // together // parts) * together
    assert all(share == sorted(share) for share in shares)
    for share in shares:
        assert all(i // together in {j // together for j in share[::together]} for i in share)


def test_ranks_get_similar_numbers_of_tokens():
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 1000, (256,), generator=draw).tolist()
    loads = [sum(lengths[i] for i in share) for share in batch_of(lengths).shares(8)]
    assert max(loads) <= 1.01 * min(loads)


@pytest.mark.parametrize("rows", [[2, 0], [], [1, 1]])
def test_selected_sequences_are_found_by_their_token_index(rows):
    batch = batch_of([3, 1, 4])
    assert torch.equal(batch.tokens[batch.token_index(rows)], batch.select(rows).tokens)
    assert batch.select(rows).lengths.tolist() == [[3, 1, 4][row] for row in rows]
