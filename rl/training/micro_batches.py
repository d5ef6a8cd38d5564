"""From a ragged Batch to the padded rectangles that one rank runs."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from rl.types import Batch


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows padded to one length L, shifted so that position t predicts the token at t + 1.

    ``tokens``, ``targets``, ``positions`` int64 [B, L]; ``weights`` and columns float32 [B, L],
    aligned with ``targets``. ``rows`` are indices into the batch; a dummy has none and weight 0.
    """

    rows: list[int]
    lengths: list[int]
    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor
    weights: torch.Tensor
    columns: dict[str, torch.Tensor]

    def to(self, device: torch.device) -> "MicroBatch":
        """The same rows with their tensors on ``device``."""
        return replace(
            self,
            tokens=self.tokens.to(device),
            targets=self.targets.to(device),
            positions=self.positions.to(device),
            weights=self.weights.to(device),
            columns={name: values.to(device) for name, values in self.columns.items()},
        )

    def unpad(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Per-row [length] tensors from ``values`` [B, L], aligned with the batch's tokens.

        The first token of a sequence is predicted by nothing: its value is 0.
        """
        return [
            torch.cat([values.new_zeros(1), values[i, : length - 1]])
            for i, length in enumerate(self.lengths[: len(self.rows)])
        ]


def micro_batches(batch: Batch, *, dp_rank: int, dp_degree: int, size: int, multiple_of: int) -> Iterator[MicroBatch]:
    """Cut ``batch`` for one data-parallel rank; every rank yields the same number.

    Rows go round to the ranks, longest first so that neighbours have like lengths; lengths are
    padded to ``multiple_of``.
    """
    if len(batch) == 0:
        raise ValueError("the batch is empty; give at least one sequence")
    by_length = sorted(range(len(batch)), key=lambda row: (-int(batch.lengths[row]), row))
    mine = by_length[dp_rank::dp_degree]
    per_rank = -(-len(batch) // dp_degree)
    for start in range(0, per_rank, size):
        yield _pad(batch, mine[start : start + size], multiple_of)


def _pad(batch: Batch, rows: list[int], multiple_of: int) -> MicroBatch:
    part = batch.select(rows or [0])
    lengths = part.lengths.tolist()
    width = -(-max(lengths) // multiple_of) * multiple_of
    row = torch.repeat_interleave(torch.arange(len(lengths)), part.lengths)
    starts = part.lengths.cumsum(0) - part.lengths
    column = torch.arange(len(row)) - starts[row]

    def rectangle(values: torch.Tensor) -> torch.Tensor:
        out = values.new_zeros(len(lengths), width + 1)
        out[row, column] = values
        return out

    tokens = rectangle(part.tokens)
    positions = torch.arange(width).clamp(max=max(lengths) - 1)  # padding may pass the model's longest sequence
    weights = rectangle(part.weights)[:, 1:]
    return MicroBatch(
        rows=rows,
        lengths=lengths,
        tokens=tokens[:, :-1].contiguous(),
        targets=tokens[:, 1:].contiguous(),
        positions=positions.expand(len(lengths), width).contiguous(),
        weights=weights.contiguous() if rows else torch.zeros_like(weights),
        columns={name: rectangle(values)[:, 1:].contiguous() for name, values in part.columns.items()},
    )
