"""Tokens that a loss is called with, and sums over their sequences."""

from typing import cast

import torch
from torch import Tensor

from rl.errors import RunError, shown


class Tokens(dict[str, Tensor]):
    """Tensors [C] by name, for the tokens of weight above 0 of whole sequences. C may be 0.

    float32: the model's outputs (``logprobs`` and ``entropy``; a critic's ``values``) and every
    column of the batch. int64: ``sequence``, the index of each token's sequence, from 0.
    """

    sequences: int | None = None
    """Number of the sequences; None for one more than the largest index, which waits for a GPU."""

    @classmethod
    def of(cls, columns: dict[str, Tensor], sequence: Tensor, sequences: int) -> "Tokens":
        """Return the tokens of so many ``sequences``."""
        tokens = cls(columns, sequence=sequence)
        tokens.sequences = sequences
        return tokens

    def __missing__(self, name: str) -> Tensor:
        names = ", ".join(sorted(self))
        raise RunError(f"the loss needs {name}, which the batch does not have; it has {names}")


def check_per_token(name: str, values: object, count: int) -> Tensor:
    """Return ``values`` of the user's code ``name``; raise RunError unless they are float32
    [count] on the CPU without a gradient.
    """
    actual = shown(values)
    if isinstance(values, Tensor):
        dtype = str(values.dtype).removeprefix("torch.")
        gradient = " with gradient" if values.requires_grad else ""
        actual = f"{dtype} {[*values.shape]} on {values.device.type}{gradient}"
    expected = f"float32 [{count}] on cpu"
    if actual != expected:
        rule = f"expected a tensor, {expected}, one number a completion token"
        raise RunError(f"{name} returned {actual}; {rule}")
    return cast(Tensor, values)


def sum_by_sequence(values: Tensor, sequence: Tensor, count: int | None = None) -> Tensor:
    """Return the sum [N] of the values [C] of each sequence; ``sums[sequence]`` spreads the sums to
    [C] again.

    ``count`` is N, by default one more than the largest of ``sequence``, int64 [C]. The default
    waits for a GPU.
    """
    if count is None:
        count = int(sequence.max()) + 1 if len(sequence) else 0
    return values.new_zeros(count).index_add(0, sequence, values)


def mean_by_sequence(values: Tensor, sequence: Tensor, count: int | None = None) -> Tensor:
    """Return the mean [N] of the values [C] of each sequence; 0 for a sequence without tokens.
    ``count`` is N, as in :func:`sum_by_sequence`.
    """
    counts = sum_by_sequence(torch.ones_like(values), sequence, count)
    return sum_by_sequence(values, sequence, count) / counts.clamp(min=1)


def token_weights(lengths: Tensor, reduction: str, max_tokens: int = 0) -> Tensor:
    """Return the weight of each completion's tokens, float32 [N], for completions of ``lengths``
    int64 [N].

    The reduced loss is the weighted sum of the token losses, divided by the sum of weights, or by
    the number of completions for ``fixed_length``. ``fixed_length`` needs ``max_tokens``, the
    maximum length of a completion.
    """
    if reduction == "sequence_mean":
        return 1.0 / lengths.clamp(min=1).float()
    if reduction == "token_mean":
        return torch.ones(len(lengths))
    return torch.full((len(lengths),), 1.0 / max_tokens)
