"""Forward pass whose bits depend on neither the batch nor the layout of its rows: matrix products,
activations and attention that trainer and generators share if ``parity`` is bitwise.

On CUDA these are vLLM's batch-invariant kernels and flex attention. The rest of this module is for
CPUs. MKL, oneDNN and torch choose a kernel there, and with it the order of sums, by the number of
rows. So products and attention have numbers of rows and keys for which the order is always the
same. Norms, softmax and log-softmax of torch compute each row by itself. All of this holds for one
thread.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from rl.compat.torch_internals import flash_attention
from rl.host.platform import device_type

Parity = Literal["close", "bitwise"]

LEAST_ROWS = 32
"""Rows of the smallest float32 product. MKL sums alike from 16 rows on."""
BLOCK_ROWS = 64
"""Rows of each bfloat16 product. oneDNN chooses its sums by the number of rows."""
LANES = 64
"""Divisor of the number of elements of an activation: torch computes the last elements of another
number by a scalar function."""
QUERIES = 128
"""Largest number of queries of a sequence that are computed together."""
FEW_QUERIES = 16
"""Number of queries below which the query heads of a key head are computed as more rows."""
ROWS = (4, 8, 16)
"""Divisors of the number of rows of queries: see ``query_rows``."""
KEYS = 512
"""Number of keys that torch's kernel sums at once."""
SPANS = (32, 64, 96, 128, 160, 192, 256, 384)
"""Smaller numbers of keys, which have the same sums on many hosts: see ``spans``."""
CELLS = 2**16
"""Largest number of keys that are gathered at once."""

_registered: torch.library.Library | None = None  # keeps the kernels registered


def use_bitwise_kernels() -> None:
    """Replace the kernels of products in this process, below autograd, with those of activations on
    CPU, and of softmax and means on CUDA.
    """
    global _registered
    if device_type() == "cuda":
        from rl.compat.batch_invariant import use_batch_invariant_kernels

        use_batch_invariant_kernels()
    elif _registered is None:
        _registered = torch.library.Library("aten", "IMPL")
        for name, kernel in KERNELS.items():
            _registered.impl(name, kernel, "CPU", allow_override=True)


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    rows = len(a)
    if not a.is_contiguous() or not a.numel():  # the gradient of a weight has no fixed rows
        return torch.mm(a, b, out=a.new_empty(rows, b.shape[1]))
    size = max(rows, LEAST_ROWS) if a.dtype == torch.float32 else BLOCK_ROWS
    if rows % size:
        a = F.pad(a, (0, 0, 0, -rows % size))
    out = a.new_empty(len(a), b.shape[1])
    for part, result in zip(a.split(size), out.split(size), strict=True):
        torch.mm(part, b, out=result)
    return out[:rows]


def _addmm(
    bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    if beta == alpha == 1:
        return _mm(a, b) + bias
    return torch.addmm(bias, a, b, beta=beta, alpha=alpha, out=a.new_empty(len(a), b.shape[1]))


def _in_lanes(compute: Any, x: torch.Tensor, **options: Any) -> torch.Tensor:
    padded = F.pad(x.flatten(), (0, -x.numel() % LANES))
    out = compute(padded, out=torch.empty_like(padded), **options)
    return out[: x.numel()].view(x.shape)  # type: ignore[no-any-return]


ACTIVATIONS = ("silu", "sigmoid", "gelu")
KERNELS: dict[str, Callable[..., torch.Tensor]] = {
    "mm": _mm,
    "addmm": _addmm,
    **{name: partial(_in_lanes, getattr(torch.ops.aten, name).out) for name in ACTIVATIONS},
}
"""Kernels that ``use_bitwise_kernels`` registers, by operator."""


class Stretch(NamedTuple):
    """Neighbouring queries of a sequence."""

    queries: np.ndarray
    """int64 [L], their cells among all queries."""
    keys: np.ndarray
    """int64 [K], the cells, among all keys, of the tokens of the sequence up to the last query."""


class Group(NamedTuple):
    """Stretches that are computed together, P of them."""

    queries: torch.Tensor
    """int64 [P, W]. The last query of a shorter stretch is repeated."""
    keys: torch.Tensor
    """int64 [P, S]. The first stands for attending to nothing; the last is repeated."""
    mask: torch.Tensor
    """Added to the scores, float32 [P, 1, W, S]. The first key has 0."""


def groups_of(stretches: Iterable[Stretch], window: int) -> list[Group]:
    """Return the groups of all ``stretches``, whose queries attend to at most ``window`` tokens, or
    to all before them if that is 0.
    """
    by_size = defaultdict(list)
    sizes = (0, *spans())
    for queries, keys in stretches:
        before = len(keys) - len(queries)
        for begin in range(0, len(queries), QUERIES):
            cells = queries[begin : begin + QUERIES]
            seen = keys[: before + begin + len(cells)]
            keys_and_none = len(seen) + 1
            over = keys_and_none % KEYS
            rest = next((size for size in sizes if over <= size), KEYS)
            width = 1 << (len(cells) - 1).bit_length()
            by_size[width, keys_and_none - over + rest].append(Stretch(cells, seen))
    groups = []
    for (width, span), members in by_size.items():
        most = max(1, CELLS // span)
        for begin in range(0, len(members), most):
            groups.append(_group(members[begin : begin + most], width, span, window or span))
    return groups


@cache
def spans() -> tuple[int, ...]:
    """Return the numbers of ``SPANS`` whose sums are those of ``KEYS`` on this host."""
    return tuple(span for span in SPANS if _same_sums(max(ROWS), span))


@cache
def query_rows() -> int:
    """Return the least of ``ROWS`` whose sums are those of more rows on this host."""
    return next((rows for rows in ROWS if _same_sums(rows, KEYS)), max(ROWS))


def _same_sums(rows: int, span: int) -> bool:
    """Whether attention of ``rows`` queries to ``span`` keys has the bits of ``QUERIES`` queries to
    ``KEYS`` keys of which only these are seen.
    """
    draw = torch.Generator().manual_seed(0)
    mask = torch.zeros(1, 1, QUERIES, KEYS)
    mask[..., span:] = -torch.inf
    for dim in (32, 64, 80, 128, 256):
        query, *pair = (
            torch.randn(1, 1, count, dim, generator=draw, dtype=torch.float32)
            for count in (QUERIES, KEYS, KEYS)
        )
        whole, _ = flash_attention(query, *pair, mask=mask, scale=dim**-0.5)
        key, value = (tensor[:, :, :span].contiguous() for tensor in pair)
        seen = mask[:, :, :rows, :span].contiguous()
        part, _ = flash_attention(query[:, :, :rows], key, value, mask=seen, scale=dim**-0.5)
        if not torch.equal(part, whole[:, :, :rows]):
            return False
    return True


def _group(members: Sequence[Stretch], width: int, span: int, window: int) -> Group:
    queries = np.empty((len(members), width), dtype=np.int64)
    keys = np.empty((len(members), span), dtype=np.int64)
    for row, (cells, seen) in enumerate(members):
        queries[row] = cells[-1]
        queries[row, : len(cells)] = cells
        keys[row] = seen[-1]
        keys[row, 1 : 1 + len(seen)] = seen
    last = np.array([[len(seen) - 1] for _, seen in members])
    first = last + 1 - np.array([[len(cells)] for cells, _ in members])
    query = np.minimum(first + np.arange(width), last)[..., None]
    key = np.arange(-1, span - 1)
    attends = torch.from_numpy((key <= query) & (key > query - window) | (key < 0)).unsqueeze(1)
    mask = torch.zeros(attends.shape).masked_fill_(~attends, -torch.inf)
    return Group(torch.from_numpy(queries), torch.from_numpy(keys), mask)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    groups: Iterable[Group],
    *,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention output [T, N, H] of queries [T, N, H] to keys and values [C, N_kv, H],
    and the log of the sum of exponentials of the scores, float32 [T, N]. Heads can attend to
    nothing with logits ``sinks`` [N].
    """
    heads = q.shape[1]
    out = torch.zeros_like(q)
    total = q.new_zeros(q.shape[:2], dtype=torch.float32)
    nothing = torch.full((heads,), -torch.inf) if sinks is None else sinks.detach().float()
    for group in groups:
        width = group.queries.shape[1]
        fold = heads // k.shape[1] if width < FEW_QUERIES else 1  # heads of a key as rows
        rows = fold * width
        more = (0, 0, 0, -rows % query_rows())
        folded = _taken(q, group.queries).unflatten(2, (-1, fold))
        query = folded.permute(0, 2, 3, 1, 4).flatten(2, 3)
        key, value = (_taken(tensor, group.keys).transpose(1, 2) for tensor in (k, v))
        key[:, :, 0] = value[:, :, 0] = 0
        mask = group.mask.repeat(1, heads // fold if sinks is not None else 1, fold, 1)
        mask[..., 0] = nothing.view(-1, fold, 1).expand(-1, -1, width).flatten(1)[: mask.shape[1]]
        parts = flash_attention(F.pad(query, more), key, value, mask=F.pad(mask, more), scale=scale)
        for whole, part in zip((out, total), parts, strict=True):
            values = part[:, :, :rows].unflatten(2, (fold, width)).flatten(1, 2).transpose(1, 2)
            whole.index_copy_(0, group.queries.flatten(), values.flatten(0, 1).to(whole.dtype))
    return out, total


def _taken(x: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
    """Return the values [P, L, ...] of ``cells`` [P, L] of ``x``, float32."""
    return x.index_select(0, cells.flatten()).float().unflatten(0, cells.shape)
