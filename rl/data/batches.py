"""Examples as batches that a trainer takes."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from rl.algorithms.batch import reduced
from rl.algorithms.losses import Reduction
from rl.data.examples import Example
from rl.data.preferences import Pair
from rl.types import Batch


def batch_of(
    examples: Sequence[Example], *, reduction: Reduction | None = None, max_tokens: int = 0
) -> Batch:
    """Return N examples as a batch of N sequences.

    Tokens that are not trained have the loss weight 0. The other weights are those of the examples,
    times those of :func:`rl.algorithms.batch.reduced` with ``reduction``; ``max_tokens`` is for
    ``fixed_length``.
    """
    loss_weights = np.concatenate([example.trained for example in examples]).astype(np.float32)
    if any(example.weights is not None for example in examples):
        weights = [np.ones(len(e)) if e.weights is None else e.weights for e in examples]
        loss_weights *= np.concatenate(weights)
    tokens = torch.from_numpy(np.concatenate([example.tokens for example in examples]))
    batch = Batch(
        tokens=tokens.long(),
        lengths=torch.tensor([len(example) for example in examples]),
        loss_weights=torch.from_numpy(loss_weights),
    )
    return batch if reduction is None else reduced(batch, reduction, max_tokens)


def batch_of_pairs(pairs: Iterable[Pair]) -> Batch:
    """Return N pairs as a batch of 2 N sequences: chosen and rejected of the first pair, of the
    second, and so on.

    All tokens of answers have the loss weight 1.
    """
    return batch_of([example for pair in pairs for example in (pair.chosen, pair.rejected)])
