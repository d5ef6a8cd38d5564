"""The tokens that a loss is called with, and sums over their sequences."""

from typing import cast

import torch

from rl.errors import RunError, shown


class Tokens(dict[str, torch.Tensor]):
    """Tensors [C] by name: the tokens that count of some whole sequences, end to end. C may be 0.

    float32: what the model put out (``logprobs`` and ``entropy``; a critic's ``values``) and every
    column of the batch. int64: ``sequence``, the number of each token's sequence, from 0.
    """

    def __missing__(self, name: str) -> torch.Tensor:
        raise RunError(
            f"the loss needs {name}, which the batch does not have; it has "
            f"{', '.join(sorted(self))}"
        )


def check_per_token(whose: str, values: object, count: int) -> torch.Tensor:
    """Return ``values`` if the user's code gave one number for each of ``count`` tokens; else raise
    RunError.
    """
    if isinstance(values, torch.Tensor):
        kind = (
            f"{str(values.dtype).removeprefix('torch.')} {[*values.shape]} on {values.device.type}"
        )
        kind += " with gradient" if values.requires_grad else ""
    else:
        kind = shown(values)
    expected = f"float32 [{count}] on cpu"
    if kind != expected:
        raise RunError(
            f"{whose} returned {kind}; expected is a tensor, {expected}, one number a completion "
            "token"
        )
    return cast(torch.Tensor, values)


def sum_by_sequence(
    values: torch.Tensor, sequence: torch.Tensor, count: int | None = None
) -> torch.Tensor:
    """Sum [N] of the values [C] of each sequence; ``per_sequence[sequence]`` spreads such sums to
    [C] again.

    ``count`` is N, by default one more than the largest of ``sequence``, int64 [C].
    """
    if count is None:
        count = int(sequence.max()) + 1 if len(sequence) else 0
    return values.new_zeros(count).index_add(0, sequence, values)


def mean_by_sequence(values: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """Mean [N] of the values [C] of each sequence; 0 of one without tokens."""
    return sum_by_sequence(values, sequence) / sum_by_sequence(
        torch.ones_like(values), sequence
    ).clamp(min=1)
