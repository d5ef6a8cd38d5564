"""Micro-batches: rectangles of tokens that one rank runs, cut from a ragged Batch."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rl.training.packing import MicroBatchLimits, Rows, plan, sizes_of
from rl.training.token_metrics import over_ranks
from rl.types import Batch
from rl.types.sampling_mask import SamplingMask


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences in rows of one length L, shifted so that each cell predicts the next token.

    - ``tokens``, ``targets``, ``positions``: int64 [B, L]; a document starts at each position 0. At
      each other position that does not follow the one before, a branch of the document starts. If
      the batch has K targets for each token, ``targets`` is [B, L, K].
    - ``index``: int64 [T], index in the whole batch of each token of the concatenated sequences.
    - ``cells``: int64 [T], cell of the flattened rectangle that predicts each token. Tokens of
      prompts may share cells.
    - ``first``: bool [T], whether a token starts its sequence, so that no cell predicts it.
    - ``lengths``: int64 [N], number of tokens of each sequence.
    - ``divisors``: float64 [N], part of each sequence in the denominator of a step.
    - ``loss_index``: int64 [C], the tokens of weight above 0, as indices in [0, T).
    - ``sequence``: int64 [C], sequence of the micro-batch of each of these tokens.
    - ``heads``: int64 [R], cells that the output head computes, ascending: those that predict a
      token of weight above 0. None for all B * L cells.
    - ``sampling_mask``: Ids that the target of each of these cells was sampled from; None for all
      ids.
    - ``experts``: int16 [B, L, layers, K], recorded experts of the input of each cell, -1 for a
      cell without a record. Of sequences that share a cell, the first with a record counts. None if
      the batch has no records.
    - ``loss_weights`` and each of ``columns``: [C], values of these tokens.
    """

    index: torch.Tensor
    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor
    cells: torch.Tensor
    first: torch.Tensor
    lengths: torch.Tensor
    divisors: torch.Tensor
    loss_index: torch.Tensor
    sequence: torch.Tensor
    loss_weights: torch.Tensor
    columns: dict[str, torch.Tensor]
    heads: torch.Tensor | None = None
    sampling_mask: SamplingMask | None = None
    experts: torch.Tensor | None = None

    def to(self, device: torch.device) -> "MicroBatch":
        """Return a copy on ``device``, except for ``index``, since outputs are collected on the
        host, and ``sampling_mask``, of which a rank needs its own cells alone.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        moved: Any = {name: data.to(device) for name, data in tensors.items() if name != "index"}
        columns = {name: values.to(device) for name, values in self.columns.items()}
        return replace(self, columns=columns, **moved)

    def per_token(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of the cells, [B, L] or [B, L, K], as values of the tokens, [T] or [T, K],
        0 for a first token.
        """
        first = self.first.view(-1, *[1] * (values.dim() - 2))
        return values.flatten(0, 1)[self.cells].masked_fill(first, 0.0)


def micro_batches_of(
    batch: Batch,
    limits: MicroBatchLimits,
    group: dist.ProcessGroup | None,
    learns: torch.Tensor | None = None,
    *,
    trains: bool = True,
    weighted: bool = False,
) -> Iterator[tuple[MicroBatch, bool]]:
    """Yield each micro-batch of this rank, and whether it is the last. While another rank of
    ``group`` has more micro-batches, yield dummies.

    With ``learns``, of each sequence, these are the micro-batches of sequences that are computed
    with a sequence that learns, at least a dummy, or if not ``trains`` the others. ``weighted``: as
    for :func:`lay_out`. Raises ValueError if the batch of no rank has a sequence.
    """
    planned = plan(batch, limits, learns, trains=trains)
    most = partial(over_ranks, group, reduction=dist.ReduceOp.MAX)
    count = int(most(value=len(planned)))
    if count == 0 and trains:
        if most(value=len(batch)) == 0:
            raise ValueError("the batch is empty; give at least one sequence")
        count = 1
    for number in range(count):
        rows = planned[number] if number < len(planned) else []
        yield lay_out(batch, rows, limits, weighted=weighted), number == count - 1


def lay_out(
    batch: Batch, rows: Rows, limits: MicroBatchLimits, *, weighted: bool = False
) -> MicroBatch:
    """Return the micro-batch of the given rows; without rows, a dummy of one row without a
    sequence. ``weighted``: whether the output head computes tokens of weight above 0 alone.
    """
    sequences = [sequence for row in rows for tree in row for sequence in tree.sequences]
    part = batch.select(sequences)
    sizes = sizes_of(part)
    width = limits.width(max([sum(tree.cells for tree in row) for row in rows], default=0))
    owner = part.owners
    place = torch.arange(len(owner)) - (part.lengths.cumsum(0) - part.lengths)[owner]
    first = place == 0
    trunk, shared, branch = _starts(rows, sizes, width)[:, owner]
    in_branch = place > shared
    cells = torch.where(in_branch, branch - shared, trunk) + place - 1
    predicted = cells[~first]
    inputs = (~first).nonzero().squeeze(1) - 1
    shape = (max(len(rows), 1), width)

    def rectangle(values: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(shape[0] * width, *values.shape[1:], dtype=torch.int64)
        out[predicted] = values
        return out.view(*shape, *values.shape[1:])

    filled = rectangle(torch.ones_like(predicted)).bool()
    # Positions of padding may exceed the model's maximum length.
    unfilled = (~filled).cumsum(1)
    padding = unfilled - torch.where(filled, unfilled, 0).cummax(1).values - 1
    padding = padding.clamp(max=max([1, *sizes]) - 1)
    tokens = rectangle(part.tokens[inputs])
    if limits.compiled and len(batch.tokens):  # long padding spreads over experts as tokens do
        tokens[~filled] = batch.tokens[torch.arange(int((~filled).sum())) % len(batch.tokens)]
    loss_index = (part.loss_weights > 0).nonzero().squeeze(1)
    heads = cells[loss_index].unique() if weighted else None
    mask = part.sampling_mask
    if mask is not None:
        mask = mask.select(in_branch.nonzero().squeeze(1).numpy())
        mask = mask.placed(cells[in_branch].numpy(), shape[0] * width)
        mask = mask if heads is None else mask.select(heads.numpy())
    experts = None
    if part.experts is not None:
        known = np.flatnonzero(part.experts.known[inputs.numpy()])
        places, firsts = np.unique(predicted.numpy()[known], return_index=True)
        placed = np.full((shape[0] * width, *part.experts.ids.shape[1:]), -1, dtype=np.int16)
        placed[places] = part.experts.ids[inputs.numpy()[known[firsts]]]
        experts = torch.from_numpy(placed).unflatten(0, shape)
    return MicroBatch(
        index=batch.token_index(sequences),
        tokens=tokens,
        targets=rectangle((part.tokens if part.targets is None else part.targets)[~first]),
        positions=torch.where(filled, rectangle(place[inputs]), padding),
        cells=cells.masked_fill(first, 0),
        first=first,
        lengths=part.lengths,
        divisors=part.divisors,
        loss_index=loss_index,
        sequence=owner[loss_index],
        loss_weights=part.loss_weights[loss_index],
        columns={name: values[loss_index] for name, values in part.columns.items()},
        heads=heads,
        sampling_mask=mask,
        experts=experts,
    )


def _starts(rows: Rows, sizes: list[int], width: int) -> torch.Tensor:
    """Return the first cell of each sequence's prompt, the number of cells that it shares with the
    sequences before, and the first cell after these, int64 [3, N].
    """
    starts = []
    for number, row in enumerate(rows):
        cell = number * width
        for tree in row:
            trunk = cell
            shared = 0
            for _ in tree.sequences:
                starts.append((trunk, shared, cell))
                cell += sizes[len(starts) - 1] - shared
                shared = tree.shared
            cell = trunk + tree.cells
    return torch.tensor(starts, dtype=torch.int64).view(-1, 3).T


def outputs_of(
    batch: Batch, parts: list[tuple[torch.Tensor, dict[str, torch.Tensor]]]
) -> dict[str, torch.Tensor]:
    """Return the outputs, [T] or [T, K], in the batch's order, in one copy from the device.
    ``parts`` are the indices and outputs of the micro-batches.
    """
    shapes = {name: values.shape[1:] for name, values in parts[0][1].items()}
    widths = [shape.numel() for shape in shapes.values()]
    outputs = [torch.cat([v.unsqueeze(-1).flatten(1) for v in out.values()], 1) for _, out in parts]
    ordered = torch.zeros(len(batch.tokens), sum(widths))
    ordered[torch.cat([index for index, _ in parts])] = torch.cat(outputs).cpu()
    named = zip(shapes.items(), ordered.split(widths, dim=1), strict=True)
    return {name: columns.reshape(-1, *shape).contiguous() for (name, shape), columns in named}
