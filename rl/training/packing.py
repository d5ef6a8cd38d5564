"""Packing: the sequences of a batch in the rows of micro-batches."""

import math
from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass
from itertools import chain

import torch

from rl.training.trainer_config import TrainerConfig
from rl.types import Batch

WIDTHS = 4
"""Number of widths of compiled rows under a limit of tokens. Even if each cost a graph with
gradients and another one without, Dynamo's limit of 8 graphs would hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchLimits:
    """Limits of micro-batches; the gradient does not depend on them."""

    sequences: int
    """Maximum number of sequences in a micro-batch if ``tokens`` is None."""

    tokens: int | None
    """Maximum number of cells in a micro-batch, including padding. A longer sequence is a
    micro-batch by itself."""

    pack: bool
    """Whether a row may hold several sequences, each a separate document."""

    one_row: bool
    """Whether packed sequences share one long row. Else rows are as long as the longest sequence:
    a dense mask costs the square of a row's length."""

    multiple_of: int
    """Divisor of the length of every row."""

    compiled: bool = False
    """Whether kernels are compiled for the shapes of rows, so that rows have few lengths."""

    sharing: int = 1
    """Maximum number of sequences of a tree."""

    align: int = 1
    """Divisor of the cell at which a sequence starts, if trees have one sequence."""

    @classmethod
    def of(cls, config: TrainerConfig, attention: str) -> "MicroBatchLimits":
        """Return the limits of a trainer. Its ``attention`` is dense, varlen or flex."""
        context = config.parallelism.context_parallel_degree
        blocks = 1 if config.float8 is None else 16  # rows per block of a float8 product
        multiple = context * math.lcm(2, config.parallelism.tensor_parallel_degree, blocks)
        one_row = attention != "dense"
        compiled = attention == "flex" or (one_row and config.compile.enable)
        if compiled:
            multiple = math.lcm(multiple, 128 * context)  # block size of flex attention
        return cls(
            sequences=config.micro_batch_size,
            tokens=config.micro_batch_tokens,
            pack=config.packing,
            one_row=one_row,
            multiple_of=multiple,
            compiled=compiled,
            sharing=config.prompt_sharing,
        )

    def width(self, cells: int) -> int:
        """Return the length of a row for ``cells`` cells.

        If kernels are compiled, a row has at least two blocks, since a row of one is a graph of its
        own. Under a limit of tokens a packed row is then as long as a quarter of the limit, half of
        it, three quarters, or all of it.
        """
        multiple = self.multiple_of
        exact = _round_up(max(cells, 2 * multiple if self.compiled else 1), multiple)
        if not (self.compiled and self.pack and self.tokens):
            return exact
        step = _round_up(-(-self.tokens // WIDTHS), multiple)
        return max(exact, min(_round_up(exact, step), self.tokens // multiple * multiple))


@dataclass(slots=True)
class Tree:
    """Sequences in one piece of a row. If they share cells, those of their prompt, they are the
    branches of one document; else each is a document.
    """

    sequences: list[int]
    """Indices into the batch."""
    cells: int
    """Number of cells, up to the next tree."""
    shared: int = 0
    """Number of cells that all sequences share: all of the prompt except for the last, which
    predicts the first token of a completion."""


Rows = list[list[Tree]]
"""Trees of each row of a micro-batch."""


def plan(
    batch: Batch,
    limits: MicroBatchLimits,
    learns: torch.Tensor | None = None,
    *,
    trains: bool = True,
) -> list[Rows]:
    """Return the rows of each micro-batch. Trees are sorted by length, longest first, so that
    neighbours have similar lengths.

    With ``learns``, bool [N], these are the rows of the units with a sequence that learns, or if
    not ``trains`` of the other units.

    With a limit of tokens, each packed tree goes to the row, in any micro-batch, with the least
    room that is enough (best-fit decreasing; Johnson, 1973). With a limit of sequences,
    micro-batches are filled one after the other. A micro-batch exceeds a limit only if it has the
    sequences alone that a batch keeps together.
    """
    units = _units(batch, limits)
    if learns is not None:
        of = learns.tolist()
        units = [
            unit for unit in units if trains == any(of[i] for tree in unit for i in tree.sequences)
        ]
    if limits.tokens is not None:
        return _best_fit(units, limits, limits.tokens)
    shares: list[list[Tree]] = []
    left = 0
    for unit in units:
        count = sum(len(tree.sequences) for tree in unit)
        if count > left:
            shares.append([])
            left = limits.sequences
        shares[-1] += unit
        left -= count
    return [_rows_of(share, limits) for share in shares]


def _units(batch: Batch, limits: MicroBatchLimits) -> list[list[Tree]]:
    """Return all sequences as trees, longest first, in lists that one micro-batch must have."""
    if batch.together == 1:
        return [[tree] for tree in _trees(batch, limits)]
    sizes = sizes_of(batch)
    shares = limits.sharing >= batch.together and batch.targets is None
    prompts = _prompts(batch) if shares else []
    units = []
    for first in range(0, len(batch), batch.together):
        together = [*range(first, first + batch.together)]
        if not limits.pack:
            units.append([Tree([sequence], sizes[sequence]) for sequence in together])
            continue
        shared = prompts[first][1] if shares and len({prompts[i][0] for i in together}) == 1 else 0
        cells = sum(sizes[sequence] for sequence in together) - shared * (len(together) - 1)
        units.append([Tree(together, cells, shared)])
    return sorted(units, key=lambda unit: -max(tree.cells for tree in unit))


def _trees(batch: Batch, limits: MicroBatchLimits) -> list[Tree]:
    """Return all sequences as trees, longest first. A tree has at most ``limits.sharing``
    sequences, and no more than a micro-batch may hold; it has one if the batch has targets.
    """
    sizes = sizes_of(batch)
    longest_first = sorted(range(len(batch)), key=lambda i: (-sizes[i], i))
    limit = min(limits.sharing, limits.sequences if limits.tokens is None else len(batch))
    if limit <= 1 or batch.targets is not None:
        return [Tree([i], _round_up(sizes[i], limits.align)) for i in longest_first]
    prompts = _prompts(batch)
    trees: list[Tree] = []
    newest: dict[bytes, Tree] = {}
    for sequence in longest_first:
        prompt, shared = prompts[sequence]
        tree = newest.get(prompt)
        cells = 0 if tree is None else tree.cells + sizes[sequence] - shared
        too_long = limits.tokens is not None and limits.width(cells) > limits.tokens
        if tree is None or len(tree.sequences) == limit or too_long:
            newest[prompt] = Tree([sequence], sizes[sequence], shared)
            trees.append(newest[prompt])
        else:
            tree.sequences.append(sequence)
            tree.cells = cells
    return sorted(trees, key=lambda tree: -tree.cells)


def shares_of(batch: Batch, count: int, sharing: int) -> list[list[int]]:
    """Return :meth:`Batch.shares` for data-parallel ranks that compute the prompt of up to
    ``sharing`` sequences once. These sequences stay together if the largest part then has fewer
    cells.
    """
    apart = batch.shares(count)
    if sharing == 1 or count == 1 or batch.together > 1 or batch.targets is not None:
        return apart
    prompts = _prompts(batch)
    sizes = sizes_of(batch)
    limit = min(sharing, -(-len(batch) // count))
    units: dict[bytes, list[list[int]]] = {}
    for row, (prompt, _) in enumerate(prompts):
        of_prompt = units.setdefault(prompt, [[]])
        if len(of_prompt[-1]) == limit:
            of_prompt.append([])
        of_prompt[-1].append(row)

    def cells(share: list[int]) -> int:
        count = sum(sizes[row] for row in share)
        for (_, shared), number in Counter(prompts[row] for row in share).items():
            count -= shared * (number - -(-number // sharing))
        return count

    joined = batch.shares(count, chain.from_iterable(units.values()))
    return min(joined, apart, key=lambda shares: max(map(cells, shares)))


def _prompts(batch: Batch) -> list[tuple[bytes, int]]:
    """Return the tokens before the first one of weight above 0 of each sequence, and the number of
    cells that only predict tokens of these.
    """
    prompts = []
    lengths = batch.lengths.tolist()
    rows = zip(batch.tokens.split(lengths), batch.loss_mask.split(lengths), strict=True)
    for tokens, mask in rows:
        count = int(mask.int().argmax()) if mask.any() else len(tokens)
        prompts.append((tokens[:count].numpy().tobytes(), count - 1))
    return prompts


def _rows_of(trees: list[Tree], limits: MicroBatchLimits) -> Rows:
    """Return the rows of one micro-batch. Each tree goes to the first row with room."""
    if not limits.pack:
        return [[tree] for tree in trees]
    if limits.one_row:
        return [trees]
    width = trees[0].cells
    rows: Rows = []
    used = list[int]()
    for tree in trees:
        row = next((r for r, cells in enumerate(used) if cells + tree.cells <= width), len(rows))
        if row == len(rows):
            rows.append([])
            used.append(0)
        rows[row].append(tree)
        used[row] += tree.cells
    return rows


def _best_fit(units: list[list[Tree]], limits: MicroBatchLimits, limit: int) -> list[Rows]:
    """Return the rows of micro-batches of at most ``limit`` cells, except for those of one longer
    unit.
    """
    planned: list[Rows] = []
    open_rows: list[tuple[int, int, int]] = []  # room, micro-batch and row, least room first
    rows_left = 0  # number of rows that the newest micro-batch may still open
    width = 0
    one_row = limits.pack and limits.one_row
    for unit in units:
        size = max(tree.cells for tree in unit)
        fits = bisect_left(open_rows, (size,))
        if fits < len(open_rows):  # rows are packed, so that the unit is one tree
            room, micro, row = open_rows.pop(fits)
            planned[micro][row] += unit
            insort(open_rows, (room - size, micro, row))
            continue
        if rows_left < len(unit):
            planned.append([])
            width = limits.width(size)
            if one_row:
                width = max(width, limit // limits.multiple_of * limits.multiple_of)
            rows_left = max(len(unit), limit // width)
        rows_left -= len(unit)
        planned[-1] += [[tree] for tree in unit]
        if limits.pack and width <= limit:
            insort(open_rows, (width - size, len(planned) - 1, len(planned[-1]) - 1))
    return planned


def sizes_of(batch: Batch) -> list[int]:
    """Return the number of cells of each sequence, whose last token predicts nothing."""
    return [length - 1 for length in batch.lengths.tolist()]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
