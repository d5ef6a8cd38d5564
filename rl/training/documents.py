"""Attention of documents on CPU: those of similar lengths are computed together."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from rl.compat.torch_internals import flash_attention, flash_attention_backward
from rl.model import parity

CALL = 2**9
"""Number of pairs of a query and a key that cost as much as one more call of the kernel."""
BLOCK = 512
"""Number of keys that torch's kernel computes at once. It leaves out later keys of causal attention
by blocks, so that a longer piece is computed alone."""
SHORT = 512
"""Number of queries of a piece up to which gradients are computed in float32: torch's kernel is
slow at small products in bfloat16."""

Cells = torch.Tensor | slice
"""Indices of the cells of all rows, laid end to end."""


class Documents(NamedTuple):
    """Documents of rows at ``positions``, int64 [B, L], with branches as in ``tree_mask``.

    They are computed in pieces, cells with consecutive positions: a document with its first branch,
    or another branch. A piece attends to itself causally, and a branch to the cells of its document
    before the branch.
    """

    positions: torch.Tensor
    bitwise: bool = False
    """Whether outputs have the bits of :func:`rl.model.parity.attend`."""

    def attend(
        self,
        qkv: Sequence[torch.Tensor],
        scale: float | None,
        window: int = 0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the attention output [B, L, N, H] of q [B, L, N, H], k and v [B, L, N_kv, H].
        ``window`` and ``sinks`` need ``bitwise``.
        """
        q, k, v = qkv
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        out, _ = _attend(q, k, v, self.positions, scale, self.bitwise, window, sinks)
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


@lru_cache(maxsize=4)  # all layers of a micro-batch with a window have the same groups
def _groups(positions: bytes, dtype: torch.dtype, window: int = 0) -> list[_Group]:
    """Return the groups of all pieces, from the bytes of the positions."""
    pieces = _pieces(positions)
    return [_group(pieces[members], dtype, window) for members in _similar(pieces)]


@lru_cache(maxsize=4)
def _bitwise_groups(positions: bytes, window: int) -> list[parity.Group]:
    stretches = []
    for begin, length, document, shared in _pieces(positions).tolist():
        cells = np.arange(begin, begin + length)
        trunk = np.arange(document, document + shared)
        stretches.append(parity.Stretch(cells, np.concatenate([trunk, cells])))
    return parity.groups_of(stretches, window)


def _pieces(positions: bytes) -> np.ndarray:
    """Return the pieces, int64 [S, 4], as :func:`_similar` takes them."""
    flat = np.frombuffer(positions, dtype=np.int64)
    begins = np.flatnonzero(np.diff(flat, prepend=-2) != 1)
    shared = flat[begins]
    documents = np.maximum.accumulate(np.where(shared == 0, begins, 0))
    return np.stack([begins, np.diff(begins, append=len(flat)), documents, shared], axis=1)


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


def _group(pieces: np.ndarray, dtype: torch.dtype, window: int) -> _Group:
    begin, length, document, shared = (column[:, None] for column in pieces.T)
    if len(pieces) == 1 and not shared and not window:
        cells = slice(begin.item(), (begin + length).item())
        return _Group(1, cells, cells, None, None)
    place = np.arange(int(length.max()))
    query = np.minimum(place, length - 1)
    key = np.arange(int((shared + length).max()))
    branch = begin + np.minimum(key - shared, length - 1)
    queries = torch.from_numpy((begin + query).ravel())
    keys = torch.from_numpy(np.where(key < shared, document + key, branch).ravel())
    mask = repeated = None
    if shared.any() or window or (length < len(place)).any():
        near = key > (shared + query)[..., None] - (window or len(key))
        attends = torch.from_numpy(near & (key <= (shared + query)[..., None])).unsqueeze(1)
        wide = torch.promote_types(dtype, torch.float32)
        mask = torch.zeros(attends.shape, dtype=wide).masked_fill_(~attends, -torch.inf)
        repeated = torch.from_numpy(place >= length)[:, None, :, None]
    return _Group(len(pieces), queries, keys, mask, repeated)


@torch.library.custom_op("tiller::attend", mutates_args=(), device_types="cpu")
def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    bitwise: bool,
    window: int,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention output of ``Documents.attend``, and the log of the sum of exponentials
    of the scores of each query, [B, L, N].
    """
    cells = positions.numpy().tobytes()
    if bitwise:
        rows = (q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1))
        groups = _bitwise_groups(cells, window)
        out, total = parity.attend(*rows, groups, scale=scale, sinks=sinks)
        return out.view(q.shape), total.view(q.shape[:-1])
    results = _outputs(q)
    for group in _groups(cells, q.dtype):
        query = group.take(group.queries, q)
        key, value = (group.take(group.keys, heads) for heads in (k, v))
        outputs = flash_attention(query, key, value, mask=group.mask, scale=scale)
        for whole, part in zip(results, outputs, strict=True):
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
    window: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v from ``grad``, that of the output."""
    # a cell that several pieces attend to has the sum of their gradients
    wide = torch.promote_types(q.dtype, torch.float32)
    results = [torch.zeros(heads.shape, dtype=wide) for heads in (q, k, v)]
    for group in _groups(positions.numpy().tobytes(), q.dtype, window):
        saved = [group.take(group.queries, tensor) for tensor in (grad, q, out, total)]
        saved += [group.take(group.keys, heads) for heads in (k, v)]
        if saved[0].shape[2] <= SHORT:
            saved = [tensor.to(wide) for tensor in saved]
        own_grad, query, own_out, own_total, key, value = saved
        if group.repeated is not None:
            own_grad = own_grad.masked_fill(group.repeated, 0.0)
        grads = flash_attention_backward(
            own_grad, query, key, value, own_out, own_total, mask=group.mask, scale=scale
        )
        cells = (group.queries, group.keys, group.keys)
        for whole, rows, part in zip(results, cells, grads, strict=True):
            values = part.transpose(1, 2).flatten(0, 1).to(whole.dtype)
            if isinstance(rows, slice):
                whole.flatten(0, 1)[rows] += values
            else:
                whole.flatten(0, 1).index_add_(0, rows, values)
    by_q, by_k, by_v = (result.to(q.dtype) for result in results)
    return by_q, by_k, by_v


@_attend.register_fake
def _outputs(q: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    total = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=total)


_attend_backward.register_fake(
    lambda _, *qkv: tuple(heads.new_empty(heads.shape) for heads in qkv[:3])
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    *qkv, positions, ctx.scale, _, ctx.window, sinks = inputs
    ctx.save_for_backward(*qkv, *output, positions, sinks)


def _backward(ctx: Any, grad: torch.Tensor, _: object) -> tuple[torch.Tensor | None, ...]:
    *saved, sinks = ctx.saved_tensors
    by_sinks = None
    if sinks is not None:  # a sink takes its part of the probability and adds nothing
        out, total, _ = saved[-3:]
        taken = (sinks.float() - total).exp()
        by_sinks = -((grad.float() * out.float()).sum(-1) * taken).sum((0, 1)).to(sinks.dtype)
    return *_attend_backward(grad, *saved, ctx.scale, ctx.window), *[None] * 4, by_sinks


_attend.register_autograd(_backward, setup_context=_keep)
