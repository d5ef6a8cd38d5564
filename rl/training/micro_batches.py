"""From a ragged Batch to the rectangles that one rank runs."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch

from rl.types import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutting:
    """How one rank's sequences are laid out; the gradient does not depend on it."""

    sequences: int
    """Most sequences in a micro-batch, where ``tokens`` is None."""

    tokens: int | None
    """Most cells in a micro-batch, padding included; a longer sequence gets one of its own."""

    pack: bool
    """Whether a row may hold several sequences, each a document of its own."""

    one_row: bool
    """Whether packed sequences share one long row. Else rows are as long as the longest sequence:
    a dense mask costs the square of a row's length."""

    multiple_of: int
    """Number that the length of a row must be a multiple of."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences in rows of one length L, shifted so that each cell predicts the next token.

    ``tokens``, ``targets``, ``positions`` int64 [B, L]; a document starts where ``positions`` is 0.
    Of the T tokens of its sequences, end to end, token t has place ``index[t]`` in the batch that
    was cut, and is predicted in cell ``cells[t]`` of the flattened rectangle, unless ``first[t]``
    says that nothing predicts it. ``loss_index`` int64 [C] are the t of weight above 0;
    ``sequence`` int64 [C], which of the micro-batch's sequences each is of, ``loss_weights`` and
    columns [C] are theirs.
    """

    index: torch.Tensor
    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor
    cells: torch.Tensor
    first: torch.Tensor
    loss_index: torch.Tensor
    sequence: torch.Tensor
    loss_weights: torch.Tensor
    columns: dict[str, torch.Tensor]

    def to(self, device: torch.device) -> "MicroBatch":
        """The same on ``device``; ``index`` stays where the outputs are put together."""
        names = [each.name for each in fields(self) if each.name not in ("index", "columns")]
        moved = {name: getattr(self, name).to(device) for name in names}
        columns = {name: values.to(device) for name, values in self.columns.items()}
        return replace(self, columns=columns, **moved)

    def per_token(self, values: torch.Tensor) -> torch.Tensor:
        """Values of the cells [B, L] as values of the tokens [T]; 0 where nothing predicts."""
        return values.flatten()[self.cells].masked_fill(self.first, 0.0)


Rows = list[list[int]]
"""Sequences of each row of a micro-batch, by their place in the batch."""


def plan(batch: Batch, cutting: Cutting) -> list[Rows]:
    """Micro-batches of the batch's sequences, longest first, so that neighbours have like
    lengths.
    """
    sizes = _sizes(batch)
    planned: list[_Filling] = []
    for sequence in sorted(range(len(batch)), key=lambda i: (-sizes[i], i)):
        if not (planned and planned[-1].take(sequence, sizes[sequence])):
            planned.append(_Filling(cutting, sequence, sizes[sequence]))
    return [filling.rows for filling in planned]


def lay_out(batch: Batch, rows: Rows, cutting: Cutting) -> MicroBatch:
    """The micro-batch of the given rows; without any, a dummy of one row that holds no sequence."""
    sequences = [sequence for row in rows for sequence in row]
    part = batch.select(sequences)
    sizes = dict(zip(sequences, _sizes(part), strict=True))
    width = max([sum(sizes[i] for i in row) for row in rows], default=0)
    width = _round_up(max(width, 1), cutting.multiple_of)
    starts = []
    for number, row in enumerate(rows):
        cell = number * width
        for sequence in row:
            starts.append(cell)
            cell += sizes[sequence]
    owner = torch.repeat_interleave(torch.arange(len(part)), part.lengths)
    place = torch.arange(len(owner)) - (part.lengths.cumsum(0) - part.lengths)[owner]
    first = place == 0
    cells = torch.tensor(starts, dtype=torch.int64)[owner] + place - 1
    predicted = cells[~first]
    inputs = (~first).nonzero().squeeze(1) - 1
    shape = (max(len(rows), 1), width)
    longest = max([1, *(sizes[i] for i in sequences)])

    def rectangle(values: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(shape[0] * width, dtype=torch.int64)
        out[predicted] = values
        return out.view(shape)

    filled = rectangle(torch.ones_like(predicted)).bool()
    # may outgrow the model's longest sequence
    padding = (~filled).cumsum(1).sub(1).clamp(max=longest - 1)
    loss_index = (part.loss_weights > 0).nonzero().squeeze(1)
    return MicroBatch(
        index=batch.token_index(sequences),
        tokens=rectangle(part.tokens[inputs]),
        targets=rectangle(part.tokens[~first]),
        positions=torch.where(filled, rectangle(place[inputs]), padding),
        cells=cells.masked_fill(first, 0),
        first=first,
        loss_index=loss_index,
        sequence=owner[loss_index],
        loss_weights=part.loss_weights[loss_index],
        columns={name: values[loss_index] for name, values in part.columns.items()},
    )


def balanced(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Sequences of each of ``shards`` ranks: like numbers of sequences (to one), and of tokens.

    The longest first, each to the rank with the fewest tokens so far that has room (Graham, 1969).
    """
    room = -(-len(lengths) // parts)
    shares: list[list[int]] = [[] for _ in range(parts)]
    tokens = [0] * parts
    for sequence in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = min((r for r in range(parts) if len(shares[r]) < room), key=lambda r: (tokens[r], r))
        shares[rank].append(sequence)
        tokens[rank] += lengths[sequence]
    return [sorted(share) for share in shares]


class _Filling:
    """A micro-batch that is being filled, longest sequence first."""

    def __init__(self, cutting: Cutting, sequence: int, size: int):
        self.cutting = cutting
        self.rows: Rows = [[sequence]]
        self._width = size
        self._used = [size]
        self._count = 1

    def take(self, sequence: int, size: int) -> bool:
        """Whether the sequence fitted in: first where a row has room, else in a new row."""
        if self.cutting.tokens is None and self._count == self.cutting.sequences:
            return False
        row = next(
            (r for r, used in enumerate(self._used) if self._has_room(used, size)), len(self.rows)
        )
        used = [*self._used, 0][: max(row + 1, len(self._used))]
        used[row] += size
        cells = len(used) * _round_up(max(used), self.cutting.multiple_of)
        if self.cutting.tokens is not None and cells > self.cutting.tokens:
            return False
        if row == len(self.rows):
            self.rows.append([])
        self.rows[row].append(sequence)
        self._used = used
        self._count += 1
        return True

    def _has_room(self, used: int, size: int) -> bool:
        return self.cutting.pack and (self.cutting.one_row or used + size <= self._width)


def _sizes(batch: Batch) -> list[int]:
    """Cells that each sequence takes: one less than its tokens, since the last one predicts
    nothing.
    """
    return [length - 1 for length in batch.lengths.tolist()]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
