"""Attention of documents on CPU: those of similar lengths are computed together."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from rl.compat.torch_internals import flash_attention, flash_attention_backward

CALL = 2**9
"""Number of pairs of a query and a key that cost as much as one more call of the kernel."""
BLOCK = 512
"""Number of keys that torch's kernel computes at once. It leaves out later keys of causal attention
by blocks, so that a longer piece is computed alone."""

Cells = torch.Tensor | slice
"""Indices of the cells of all rows, laid end to end."""


class Documents(NamedTuple):
    """Documents of rows at ``positions``, int64 [B, L], with branches as in ``tree_mask``.

    They are computed in pieces, cells with consecutive positions: a document with its first branch,
    or another branch. A piece attends to itself causally, and a branch to the cells of its document
    before the branch.
    """

    positions: torch.Tensor

    def attend(self, qkv: Sequence[torch.Tensor], scale: float | None) -> torch.Tensor:
        """Return the attention output [B, L, N, H] of q [B, L, N, H], k and v [B, L, N_kv, H]."""
        q, k, v = qkv
        out, _ = _attend(q, k, v, self.positions, q.shape[-1] ** -0.5 if scale is None else scale)
        return out  # type: ignore[no-any-return]


class _Group(NamedTuple):
    """Pieces that are computed together, P of them, each with the same number of cells."""

    pieces: int
    queries: Cells
    """Cells of the queries, P * width. The last cell of a shorter piece is repeated."""
    keys: Cells
    """Cells of the keys, P * span."""
    mask: torch.Tensor | None
    """Added to the scores, [P, 1, width, span]. None if queries and keys are the same cells, and
    attention is causal."""
    repeated: torch.Tensor | None
    """Whether each query is a repeated one, bool [P, 1, width, 1]; None if none is."""

    def take(self, cells: Cells, of: torch.Tensor) -> torch.Tensor:
        """Return the values of ``cells`` among ``of`` [B, L, N, ...], as [P, N, cells, ...]."""
        flat = of.flatten(0, 1)
        taken = flat[cells] if isinstance(cells, slice) else flat.index_select(0, cells)
        return taken.unflatten(0, (self.pieces, -1)).transpose(1, 2)


@lru_cache(maxsize=2)  # all layers of a micro-batch have the same groups
def _groups(positions: bytes, dtype: torch.dtype) -> list[_Group]:
    """Return the groups of all pieces, from the bytes of the positions."""
    flat = np.frombuffer(positions, dtype=np.int64)
    begins = np.flatnonzero(np.diff(flat, prepend=-2) != 1)
    shared = flat[begins]
    documents = np.maximum.accumulate(np.where(shared == 0, begins, 0))
    pieces = np.stack([begins, np.diff(begins, append=len(flat)), documents, shared], axis=1)
    return [_group(pieces[members], dtype) for members in _similar(pieces)]


def _similar(pieces: np.ndarray) -> Iterator[list[int]]:
    """Yield the indices of pieces that are computed together, longest first.

    ``pieces`` is int64 [S, 4]. A piece has its first cell, its number of cells, the first cell of
    its document, and the number of cells there that it attends to.
    """
    lengths = pieces[:, 1]
    spans = lengths + pieces[:, 3]
    pairs = lengths * spans
    members: list[int] = []
    for piece in np.lexsort((-lengths, -spans)).tolist():
        if members:
            longest = members[0]
            fits = spans[longest] <= BLOCK and lengths[piece] <= lengths[longest]
            if not fits or pairs[longest] - pairs[piece] > CALL:
                yield members
                members = []
        members.append(piece)
    yield members


def _group(pieces: np.ndarray, dtype: torch.dtype) -> _Group:
    begin, length, document, shared = (column[:, None] for column in pieces.T)
    if len(pieces) == 1 and not shared:
        cells = slice(begin.item(), (begin + length).item())
        return _Group(1, cells, cells, None, None)
    place = np.arange(int(length.max()))
    query = np.minimum(place, length - 1)
    key = np.arange(int((shared + length).max()))
    own = begin + np.minimum(key - shared, length - 1)
    queries = torch.from_numpy((begin + query).ravel())
    keys = torch.from_numpy(np.where(key < shared, document + key, own).ravel())
    mask = repeated = None
    if shared.any() or (length < len(place)).any():
        attends = torch.from_numpy(key <= (shared + query)[..., None]).unsqueeze(1)
        mask = torch.zeros(attends.shape, dtype=dtype).masked_fill_(~attends, -torch.inf)
        repeated = torch.from_numpy(place >= length)[:, None, :, None]
    return _Group(len(pieces), queries, keys, mask, repeated)


@torch.library.custom_op("tiller::attend", mutates_args=(), device_types="cpu")
def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention output of ``Documents.attend``, and the log of the sum of exponentials
    of the scores of each query, [B, L, N].
    """
    results = _outputs(q)
    for group in _groups(positions.numpy().tobytes(), q.dtype):
        query = group.take(group.queries, q)
        key, value = (group.take(group.keys, each) for each in (k, v))
        found = flash_attention(query, key, value, mask=group.mask, scale=scale)
        for whole, part in zip(results, found, strict=True):
            whole.flatten(0, 1)[group.queries] = part.transpose(1, 2).flatten(0, 1)
    return results


@torch.library.custom_op("tiller::attend_backward", mutates_args=(), device_types="cpu")
def _attend_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v from ``grad``, that of the output."""
    # a cell that several pieces attend to has the sum of their gradients
    wide = torch.promote_types(q.dtype, torch.float32)
    results = [torch.zeros(each.shape, dtype=wide) for each in (q, k, v)]
    for group in _groups(positions.numpy().tobytes(), q.dtype):
        own_grad, query, own_out, own_total = (
            group.take(group.queries, each) for each in (grad, q, out, total)
        )
        if group.repeated is not None:
            own_grad = own_grad.masked_fill(group.repeated, 0.0)
        key, value = (group.take(group.keys, each) for each in (k, v))
        found = flash_attention_backward(
            own_grad, query, key, value, own_out, own_total, mask=group.mask, scale=scale
        )
        cells = (group.queries, group.keys, group.keys)
        for whole, own, part in zip(results, cells, found, strict=True):
            values = part.transpose(1, 2).flatten(0, 1).to(whole.dtype)
            if isinstance(own, slice):
                whole.flatten(0, 1)[own] += values
            else:
                whole.flatten(0, 1).index_add_(0, own, values)
    by_q, by_k, by_v = (each.to(q.dtype) for each in results)
    return by_q, by_k, by_v


@_attend.register_fake
def _outputs(q: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    total = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=total)


@_attend_backward.register_fake
def _gradients(_: object, *qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(each.new_empty(each.shape) for each in qkv[:3])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *qkv, positions, ctx.scale = inputs
    ctx.save_for_backward(*qkv, *output, positions)


def _backward(ctx: Any, grad: torch.Tensor, _: object) -> tuple[torch.Tensor | None, ...]:
    return *_attend_backward(grad, *ctx.saved_tensors, ctx.scale), None, None


_attend.register_autograd(_backward, setup_context=_keep)
