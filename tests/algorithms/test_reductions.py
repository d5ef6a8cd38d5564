"""Sums and means of tokens over sequences and batches are those of the papers."""

from dataclasses import replace

import pytest
import torch

from rl.algorithms.batch import reduced, reduced_for, without
from rl.algorithms.losses import ClippedLoss, ValueLoss
from rl.algorithms.tokens import mean_by_sequence, sum_by_sequence, token_weights
from rl.errors import RunError
from rl.types import Batch

LENGTHS = [3, 1, 6, 4, 8]


def made() -> Batch:
    """Return a batch of sequences whose first token is a prompt of the weight 0."""
    lengths = torch.tensor(LENGTHS) + 1
    weights = torch.ones(int(lengths.sum()))
    weights[lengths.cumsum(0) - lengths] = 0.0
    return Batch(tokens=torch.zeros(len(weights)).long(), lengths=lengths, loss_weights=weights)


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
        batch = reduced(made(), reduction, 10)
        weights = batch.loss_weights
        divisor = weights if batch.denominators is None else batch.denominators
        found = (values * weights[batch.loss_mask]).sum() / divisor.sum()
        torch.testing.assert_close(found, mean, rtol=1e-6, atol=1e-7)
    assert token_weights(torch.tensor([0]), "sequence_mean").isfinite().all()
    with pytest.raises(ZeroDivisionError):
        token_weights(lengths, "fixed_length")


def test_a_batch_gets_the_reduction_of_its_loss_once():
    mean = ClippedLoss.Config(reduction="sequence_mean")
    batch = reduced_for(made(), mean)
    assert torch.equal(batch.loss_weights, reduced(made(), "sequence_mean").loss_weights)
    assert reduced_for(batch, mean) is batch
    assert reduced_for(batch.select([1, 2]), mean).reduction == "sequence_mean"
    for untouched in (made(), batch):
        assert reduced_for(untouched, ValueLoss.Config()) is untouched


@pytest.mark.parametrize(
    ("batch", "reduction", "message"),
    [
        (reduced(made(), "token_mean"), "sequence_mean", "is 'sequence_mean'.*='token_mean'"),
        (made(), "fixed_length", "make the batch with reduction='fixed_length' and max_tokens"),
    ],
)
def test_a_reduction_that_the_batch_cannot_have_is_refused(batch, reduction, message):
    with pytest.raises(RunError, match=message):
        reduced_for(batch, ClippedLoss.Config(reduction=reduction))


@pytest.mark.parametrize("reduction", ["sequence_mean", "token_mean", "fixed_length"])
def test_a_batch_without_masked_rollouts_has_the_loss_of_the_others(reduction):
    """The last two sequences are of one rollout."""
    whole = replace(reduced(made(), reduction, 10), rollouts=torch.tensor([0, 1, 2, 3, 3]))
    costs = torch.randn(len(whole.tokens))
    found = without(whole, [False, True, False, True])
    rest = whole.select([0, 2])
    rows = torch.isin(whole.owners, torch.tensor([0, 2]))
    wanted = (costs[rows] * rest.loss_weights).sum() / rest.divisors.sum()
    loss = (costs * found.loss_weights).sum() / found.divisors.sum()
    torch.testing.assert_close(loss.double(), wanted.double(), rtol=1e-6, atol=1e-6)


def test_sequences_are_summed_and_averaged_separately():
    values = torch.tensor([1.0, 2.0, 3.0, 4.0])
    sequence = torch.tensor([0, 0, 0, 2])
    assert sum_by_sequence(values, sequence).tolist() == [6.0, 0.0, 4.0]
    assert mean_by_sequence(values, sequence).tolist() == [2.0, 0.0, 4.0]
    assert sum_by_sequence(values, sequence, 4).tolist() == [6.0, 0.0, 4.0, 0.0]
    assert mean_by_sequence(values[:0], sequence[:0]).tolist() == []
    assert mean_by_sequence(values, sequence)[sequence].tolist() == [2.0, 2.0, 2.0, 4.0]
