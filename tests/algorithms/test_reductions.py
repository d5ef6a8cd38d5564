"""Sums and means of tokens over sequences and batches are those of the papers."""

import pytest
import torch

from rl.algorithms.losses import batch_denominator, token_weights
from rl.algorithms.tokens import mean_by_sequence, sum_by_sequence

LENGTHS = [3, 1, 6, 4, 8]


def reduced(values, weights, lengths, reduction):
    return (values * weights).sum() / (batch_denominator(len(lengths), reduction) or weights.sum())


def test_reductions_match_the_papers():
    """GRPO eq. 3, DAPO eq. 8, and Dr. GRPO eq. 2 over the maximum length of a completion."""
    lengths = torch.tensor(LENGTHS)
    values = torch.randn(sum(LENGTHS), dtype=torch.float64)
    sums = torch.stack([part.sum() for part in values.split(LENGTHS)])
    wanted = {
        "sequence_mean": (sums / lengths).mean(),
        "token_mean": sums.sum() / sum(LENGTHS),
        "fixed_length": sums.mean() / 10,
    }
    for reduction, mean in wanted.items():
        weights = token_weights(lengths, reduction, 10).repeat_interleave(lengths)
        torch.testing.assert_close(
            reduced(values, weights, lengths, reduction), mean, rtol=1e-6, atol=1e-7
        )
    assert token_weights(torch.tensor([0]), "sequence_mean").isfinite().all()
    with pytest.raises(ZeroDivisionError):
        token_weights(lengths, "fixed_length")


def test_sequences_are_summed_and_averaged_separately():
    values = torch.tensor([1.0, 2.0, 3.0, 4.0])
    sequence = torch.tensor([0, 0, 0, 2])
    assert sum_by_sequence(values, sequence).tolist() == [6.0, 0.0, 4.0]
    assert mean_by_sequence(values, sequence).tolist() == [2.0, 0.0, 4.0]
    assert sum_by_sequence(values, sequence, 4).tolist() == [6.0, 0.0, 4.0, 0.0]
    assert mean_by_sequence(values[:0], sequence[:0]).tolist() == []
    assert mean_by_sequence(values, sequence)[sequence].tolist() == [2.0, 2.0, 2.0, 4.0]
