"""Examples as batches that a trainer takes."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from rl.algorithms.losses import Reduction, token_weights
from rl.data.examples import Example
from rl.data.preferences import Pair
from rl.types import Batch


def batch_of(
    examples: Sequence[Example], *, reduction: Reduction = "token_mean", max_tokens: int = 0
) -> Batch:
    """Return N examples as a batch of N sequences.

    Tokens that are not trained have the loss weight 0. The other weights are those of
    :func:`rl.algorithms.losses.token_weights`; ``max_tokens`` is for ``fixed_length``.
    """
    trained = torch.from_numpy(np.concatenate([example.trained for example in examples]))
    counts = torch.tensor([int(example.trained.sum()) for example in examples])
    loss_weights = torch.zeros(len(trained))
    loss_weights[trained] = token_weights(counts, reduction, max_tokens).repeat_interleave(counts)
    tokens = torch.from_numpy(np.concatenate([example.tokens for example in examples]))
    return Batch(
        tokens=tokens.long(),
        lengths=torch.tensor([len(example) for example in examples]),
        loss_weights=loss_weights,
    )


def batch_of_pairs(pairs: Iterable[Pair]) -> Batch:
    """Return N pairs as a batch of 2 N sequences: chosen and rejected of the first pair, of the
    second, and so on.

    All tokens of answers have the loss weight 1.
    """
    return batch_of([example for pair in pairs for example in (pair.chosen, pair.rejected)])
