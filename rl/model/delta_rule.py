"""The gated delta rule (arXiv:2412.06464) and the convolution before it, for sequences of any
lengths that lie end to end.

Trainer and generator call the same functions: the one without states, the other with those of its
cache.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from rl.compat.torch_internals import recorded_in_operator

CHUNK = 64
"""Number of tokens that are computed together, as in transformers. A part of a sequence that is
computed alone has the numbers of the whole if it is a multiple."""

Lengths = tuple[int, ...]
"""Numbers of tokens of S sequences, T in all; none is 0."""


class Heads(NamedTuple):
    """Heads in the rows of a gated delta net: for each key head a query, a key and its values."""

    key_dim: int
    value_dim: int
    values: int
    """Number of value heads of a key head."""

    @property
    def widths(self) -> list[int]:
        """Number of rows of a query, of a key, and of all values of a key head."""
        return [self.key_dim, self.key_dim, self.values * self.value_dim]

    @property
    def rows(self) -> int:
        """Number of rows of a key head."""
        return sum(self.widths)

    @property
    def flop(self) -> int:
        """Floating-point operations of a value head for a token: products within a chunk, and of
        query, key and update with the state.
        """
        key, value = self.key_dim, self.value_dim
        return CHUNK * (5 * key + 3 * value) + 6 * key * value

    def split(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries and keys [T, key heads, key_dim] and values [T, N, value_dim] of ``rows``
        [T, D].
        """
        q, k, v = rows.unflatten(-1, (-1, self.rows)).split(self.widths, dim=-1)
        return q, k, v.reshape(len(rows), -1, self.value_dim)


class States(NamedTuple):
    """State of a gated delta net after S sequences."""

    inputs: torch.Tensor
    """Last inputs of the convolution, [S, kernel - 1, D]."""
    memory: torch.Tensor
    """State of the delta rule, float32 [S, N, key_dim, value_dim]."""


def delta_net(
    rows: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    weight: torch.Tensor,
    heads: Heads,
    lengths: Lengths,
    states: States | None = None,
) -> tuple[torch.Tensor, States]:
    """Return the outputs [T, N, value_dim] of convolution and delta rule, and the states after each
    sequence.

    ``rows`` [T, D] have the ``heads``. ``decay`` [T, N] is the logarithm of what is kept of the
    state, ``beta`` [T, N] the strength of an update, and ``weight`` [D, 1, kernel] that of the
    convolution. ``states`` are those before the sequences; None for zeros.
    """
    before, memory = (None, None) if states is None else states
    mixed, after = convolve(rows, weight.squeeze(1), lengths, before)
    out, memory = delta_rule(*heads.split(mixed), decay, beta, lengths, memory)
    return out.to(rows.dtype), States(after, memory)


def convolve(
    rows: torch.Tensor, weight: torch.Tensor, lengths: Lengths, inputs: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return SiLU of the causal convolution of each column of ``rows`` [T, D] with its row of
    ``weight`` [D, kernel], and the last inputs of each sequence, [S, kernel - 1, D]. ``inputs`` are
    those before the sequences; None for zeros.
    """
    tail = weight.shape[1] - 1
    if inputs is None:
        inputs = rows.new_zeros(len(lengths), tail, rows.shape[1])
    source = torch.cat([inputs.to(rows.dtype).flatten(0, 1), rows])
    taps, after = _taps(lengths, tail, rows.device)
    out = source.index_select(0, taps[-1]) * weight[:, -1]
    for n, tap in enumerate(taps[:-1]):
        out = out + source.index_select(0, tap) * weight[:, n]
    return F.silu(out), source.index_select(0, after).unflatten(0, (len(lengths), tail))


@lru_cache(maxsize=4)  # all layers of a batch have the same
def _taps(lengths: Lengths, tail: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row of each factor of each token, [tail + 1, T], and of the last inputs,
    [S * tail]. Before the T tokens are ``tail`` earlier inputs of each sequence.
    """
    sizes = np.asarray(lengths)
    starts = np.cumsum(sizes) - sizes

    def row(sequence: np.ndarray, position: np.ndarray) -> np.ndarray:
        earlier = (sequence + 1) * tail + position
        current = len(sizes) * tail + starts[sequence] + position
        return np.where(position < 0, earlier, current)

    sequences = np.repeat(np.arange(len(sizes)), sizes)
    positions = np.arange(sizes.sum()) - starts[sequences]
    taps = row(sequences, positions + np.arange(-tail, 1)[:, None])
    after = row(np.arange(len(sizes))[:, None], sizes[:, None] + np.arange(-tail, 0))
    return torch.from_numpy(taps).to(device), torch.from_numpy(after.ravel()).to(device)


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    lengths: Lengths,
    memory: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs [T, N, V] and the state after each sequence, [S, N, K, V], float32 or wider.

    Queries ``q`` and keys ``k`` are [T, key heads, K] before their normalization, values ``v``
    [T, N, V], ``decay`` and ``beta`` [T, N] as in :func:`delta_net`. ``memory`` is the state before
    the sequences; None for zeros. Uses fla on CUDA if it is installed, which no test covers.
    """
    values = v.shape[1] // k.shape[1]
    q, k = (tensor.repeat_interleave(values, 1) for tensor in (q, k))
    if q.is_cuda and (kernel := _fla_kernel()) is not None:
        ends = torch.tensor((0, *lengths), device=q.device).cumsum(0)
        packed = (tensor.unsqueeze(0) for tensor in (q, k, v.to(q.dtype), decay.float(), beta))
        options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        out, memory = kernel(*packed, initial_state=memory, cu_seqlens=ends, **options)
        return out.squeeze(0).float(), memory
    wide = torch.promote_types(q.dtype, torch.float32)
    q, k, v, decay, beta = (tensor.to(wide) for tensor in (q, k, v, decay, beta))
    q = _normalized(q) * q.shape[-1] ** -0.5
    return _in_chunks((q, _normalized(k), v, decay, beta), _chunks(lengths, q.device), memory)


@cache
def _fla_kernel() -> Any:
    """Return fla's delta rule; None without fla."""
    has_fla = find_spec("fla") is not None
    return import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule if has_fla else None


def _normalized(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


class _Chunks(NamedTuple):
    """Places of the tokens of S sequences in M chunks: all first ones, all second ones, ..."""

    order: torch.Tensor
    """Sequences, longest first, [S]."""
    counts: tuple[int, ...]
    """Number of first chunks, of second ones, and so on."""
    tokens: torch.Tensor
    """Token of each place, [M * size]; T for a place without a token."""
    places: torch.Tensor
    """Place of each token, [T]."""
    size: int

    def cut(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` [T, N, ...] as [M, N, size, ...]. Places without a token are 0, which change
        no state.
        """
        padded = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
        return padded.index_select(0, self.tokens).unflatten(0, (-1, self.size)).transpose(1, 2)

    def joined(self, chunks: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the opposite of :meth:`cut`."""
        return torch.cat([*chunks]).transpose(1, 2).flatten(0, 1).index_select(0, self.places)


@lru_cache(maxsize=4)
def _chunks(lengths: Lengths, device: torch.device) -> _Chunks:
    sizes = np.asarray(lengths)
    size = min(CHUNK, int(sizes.max()))
    total = int(sizes.sum())
    starts = np.cumsum(sizes) - sizes
    order = np.argsort(-sizes, kind="stable")
    needed = -(-sizes[order] // size)
    counts = tuple(int((needed > number).sum()) for number in range(needed[0]))
    rows = []
    for number, count in enumerate(counts):
        members = order[:count, None]
        offset = number * size + np.arange(size)
        rows.append(np.where(offset < sizes[members], starts[members] + offset, total))
    tokens = np.concatenate(rows).ravel()
    places = np.empty(total + 1, dtype=np.int64)
    places[tokens] = np.arange(len(tokens))

    def on_device(indices: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(indices).to(device)

    return _Chunks(on_device(order), counts, on_device(tokens), on_device(places[:total]), size)


def _in_chunks(
    inputs: tuple[torch.Tensor, ...], chunks: _Chunks, memory: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return :func:`delta_rule` of normalized queries and keys, by the WY representation of the
    updates within a chunk (arXiv:2406.06484).
    """
    q, k, v, decay, beta = map(chunks.cut, inputs)
    total = decay.cumsum(-1)
    later = torch.ones(chunks.size, chunks.size, dtype=torch.bool, device=q.device).triu(1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, -torch.inf).exp()
    since_start = total.exp().unsqueeze(-1)
    weighted = k * beta.unsqueeze(-1)
    system = (weighted @ k.mT) * between  # the solver takes its diagonal as 1
    right = torch.cat([v * beta.unsqueeze(-1), weighted * since_start], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    updates, reads = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    within = (q @ k.mT) * between
    q = q * since_start
    keys = (k * (total[..., -1:] - total).exp().unsqueeze(-1)).mT
    decayed = since_start[..., -1:, :]

    sequences = len(chunks.order)
    if memory is None:
        state = q.new_zeros(sequences, *keys.shape[1:3], v.shape[-1])
    else:
        state = memory.to(q.dtype).index_select(0, chunks.order)
    outputs: list[torch.Tensor] = []
    ended: list[torch.Tensor] = []
    start = 0
    for count in chunks.counts:
        ended.append(state[count:])
        state = state[:count]
        here = slice(start, start + count)
        start += count
        changes = updates[here] - reads[here] @ state
        outputs.append(q[here] @ state + within[here] @ changes)
        state = state * decayed[here] + keys[here] @ changes
    states = torch.cat([state, *reversed(ended)])
    return chunks.joined(outputs), states.index_select(0, chunks.order.argsort())


def _of_documents(
    rows: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    weight: torch.Tensor,
    positions: torch.Tensor,
    heads: list[int],
) -> torch.Tensor:
    starts = (positions == 0).nonzero().flatten().tolist()
    lengths = tuple(np.diff([*starts, len(positions)]).tolist())
    return delta_net(rows, decay, beta, weight, Heads(*heads), lengths)[0]


_delta_net = torch.library.custom_op("tiller::delta_net", _of_documents, mutates_args=())


@torch.library.custom_op("tiller::delta_net_backward", mutates_args=())
def _delta_net_backward(
    grad: torch.Tensor,
    rows: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    weight: torch.Tensor,
    positions: torch.Tensor,
    heads: list[int],
) -> list[torch.Tensor]:
    with recorded_in_operator():
        rows, decay, beta, weight = inputs = [
            tensor.detach().requires_grad_() for tensor in (rows, decay, beta, weight)
        ]
        out = _of_documents(rows, decay, beta, weight, positions, heads)
        grads = torch.autograd.grad(out, inputs, grad)
    return [tensor.contiguous() for tensor in grads]


@_delta_net.register_fake
def _outputs(rows: torch.Tensor, decay: torch.Tensor, *rest: Any) -> torch.Tensor:
    return rows.new_empty(*decay.shape, rest[-1][1])


_delta_net_backward.register_fake(lambda _, *inputs: [*map(torch.empty_like, inputs[:4])])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.heads = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return *_delta_net_backward(grad, *ctx.saved_tensors, ctx.heads), None, None


_delta_net.register_autograd(_backward, setup_context=_keep)


def delta_net_of_documents(
    rows: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    weight: torch.Tensor,
    heads: Heads,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Return the outputs of :func:`delta_net` for documents, which start at each 0 of ``positions``
    [T].

    It is one operator, which keeps its inputs alone: its backward pass computes the forward again.
    """
    return _delta_net(rows, decay, beta, weight, positions, [*heads])
