"""Requests of ``forward`` and ``forward_backward``: their data as one batch, and their answers. ::

    message = parse_forward_backward(read_body(body, encoding, limit))  # raises BadRequest
    work = prepare(message, limits, graphs)  # raises UserError
    answer = await work.run(forward, forward_backward, differentiate)  # raises UserError

``forward`` and ``forward_backward`` are those of a session, bound to the adapter of the model;
``differentiate`` is that of :class:`rl.tinker.custom_losses.CustomLosses`. All that a client's data
can make fail comes before the call of ``forward_backward``.
"""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rl.algorithms.tokens import Tokens
from rl.tinker.custom_losses import Datums, Derivatives
from rl.tinker.errors import require
from rl.tinker.graph import Graph
from rl.tinker.losses import CLIP, FORMULAS, SAMPLED, STAND_IN, SUM, TinkerLoss
from rl.tinker.wire import array_of, encode_outputs, tokens_of
from rl.types import Batch

Numbers = Mapping[str, float]
Values = dict[str, torch.Tensor]
"""Outputs or columns of a batch."""
Inputs = dict[str, np.ndarray]
"""Arrays of a datum's loss; ``target_tokens``, int64 [N] or [N, K], has the ids that are scored."""
TARGETS = "target_tokens"
CROSS_ENTROPY = TinkerLoss.Config(name="cross_entropy")
MISSING = np.zeros((0, 0, 0), np.float32)
"""Array of no shape that an input may have."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a request."""

    vocab_size: int
    max_tokens: int
    """Maximum number of tokens of a datum."""
    datums: int = 4096
    targets: int = 256
    """Maximum number of targets of a token."""
    cells: int = 1 << 24
    """Maximum number of elements of all arrays, and of the targets with padding."""
    stand_ins: bool = False
    """Whether another loss stands in for ``stable_reinforce``."""


@dataclass(frozen=True)
class ForwardBackward:
    """Request whose data were checked."""

    forward_only: bool
    loss: TinkerLoss.Config | Graph
    inputs: list[Inputs]
    batch: Batch

    async def run(
        self,
        forward: Callable[[Batch], Awaitable[Values]],
        forward_backward: Callable[[Batch, Any], Awaitable[tuple[Values, Numbers]]],
        differentiate: Callable[[Graph, Datums], Awaitable[Derivatives]],
    ) -> bytes:
        """Return the answer, a message ForwardBackwardOutput."""
        if isinstance(self.loss, Graph):
            outputs = await forward(self.batch)
            datums = [*zip(self._logprobs(outputs), self.inputs, strict=True)]
            weights, metrics = await differentiate(self.loss, datums)
            if not self.forward_only:
                linear = replace(self.batch, columns={"weights": _column(weights, 0.0)})
                outputs, _ = await forward_backward(linear, CROSS_ENTROPY)
        elif self.forward_only:
            outputs = await forward(self.batch)
            metrics = {"loss:sum": self._value(self.loss, outputs)}
        else:
            outputs, measured = await forward_backward(self.batch, self.loss)
            metrics = {"loss:sum": measured[SUM]}
        return encode_outputs(self._logprobs(outputs), metrics)

    def _logprobs(self, outputs: Values) -> list[np.ndarray]:
        return target_logprobs(outputs, [arrays[TARGETS] for arrays in self.inputs])

    @torch.no_grad()
    def _value(self, loss: TinkerLoss.Config, outputs: Values) -> float:
        """Return the sum of the loss."""
        counted = self.batch.loss_mask
        columns = {"logprobs": outputs["logprobs"], "sequence": self.batch.owners}
        values = {**self.batch.columns, **columns}
        costs, _ = loss.build()(Tokens({name: column[counted] for name, column in values.items()}))
        return float(costs.sum(dtype=torch.float64))


def prepare(message: Any, limits: Limits, graphs: Mapping[str, Graph]) -> ForwardBackward:
    """Return the request of a message ForwardBackwardRequest. ``graphs`` are custom losses by id.

    Raises UserError if the request cannot work. May run in a thread.
    """
    count = len(message.data)
    require(0 < count <= limits.datums, f"the request has {count} datums; limit: {limits.datums:,}")
    settings: dict[str, Any] = dict(message.loss_fn_config)
    settings |= {key: item.text or item.number for key, item in message.loss_fn_config_v2.items()}
    loss = _loss_of(message.loss_fn, settings, limits, graphs)
    tokens, inputs = _arrays_of(message.data, limits)
    targets = [arrays[TARGETS] for arrays in inputs]
    cells = max(ids[0].size for ids in targets) * sum(map(len, tokens))
    require(cells <= limits.cells, f"the targets have {cells:,} cells; limit: {limits.cells:,}")
    columns = {} if isinstance(loss, Graph) else _columns(loss.name, settings, inputs)
    return ForwardBackward(message.forward_only, loss, inputs, batch_of(tokens, targets, columns))


def batch_of(
    tokens: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
    columns: Mapping[str, torch.Tensor] | None = None,
) -> Batch:
    """Return a batch that scores ``targets``, int64 [N] or [N, K], after each of the ``tokens``,
    int64 [N], of each sequence. -1 is not a target.

    Each sequence gets one more token, a placeholder, which the last targets are about.
    """
    lengths = torch.tensor([len(ids) + 1 for ids in tokens])
    return Batch(
        tokens=torch.from_numpy(np.concatenate([np.append(ids, 0) for ids in tokens])),
        lengths=lengths,
        loss_weights=_column([np.ones(len(ids), np.float32) for ids in tokens], 0.0),
        targets=_column(targets, -1),
        columns=dict(columns or {}),
    )


def target_logprobs(outputs: Values, targets: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the log-probs of the targets of each sequence, in the shape of its targets, from the
    outputs of :func:`batch_of`.
    """
    parts = outputs["logprobs"].split([len(ids) + 1 for ids in targets])
    flat = [part[1:].reshape(len(part) - 1, -1).numpy() for part in parts]
    pairs = zip(flat, targets, strict=True)
    return [part[:, : ids[0].size].reshape(ids.shape) for part, ids in pairs]


def _column(parts: Sequence[np.ndarray], fill: float) -> torch.Tensor:
    """Return a column, [T] or [T, K], of the values of each sequence, [N] or [N, K]."""
    flat = [part.reshape(len(part), -1) for part in parts]
    width = max(matrix.shape[1] for matrix in flat)
    more = [((1, 0), (0, width - matrix.shape[1])) for matrix in flat]
    rows = [np.pad(*pair, constant_values=fill) for pair in zip(flat, more, strict=True)]
    column = torch.from_numpy(np.concatenate(rows))
    return column if any(part.ndim == 2 for part in parts) else column.squeeze(1)


def _loss_of(
    name: str, settings: Mapping[str, Any], limits: Limits, graphs: Mapping[str, Graph]
) -> TinkerLoss.Config | Graph:
    """Return the loss of a name. Raises UserError if it does not have all of ``settings``."""
    if name == "custom":
        right = [*settings] == ["loss_id"] and settings["loss_id"] in graphs
        require(right, "loss_fn 'custom' takes one setting: loss_id, of a loss of this session")
        return graphs[settings["loss_id"]]
    served = [loss_fn for loss_fn in FORMULAS if limits.stand_ins or loss_fn != STAND_IN]
    require(name in served, f"loss_fn {name!r} is not served; served are {served} and 'custom'")
    known = FORMULAS[name].settings
    for key, value in settings.items():
        right = key in known and isinstance(value, float) and 0 <= value < math.inf
        rule = f"it takes {[*known]}, numbers of at least 0"
        require(right, f"loss_fn_config of {name!r} has {key}={value!r}; {rule}")
    return TinkerLoss.Config(name=name)


def _arrays_of(data: Sequence[Any], limits: Limits) -> tuple[list[np.ndarray], list[Inputs]]:
    """Return the tokens and the arrays of each datum."""
    left = limits.cells
    tokens = []
    inputs = []
    for number, datum in enumerate(data):
        place = f"datum {number}"
        ids = tokens_of(datum.model_input, place)
        count = len(ids)
        most = limits.max_tokens
        require(0 < count <= most, f"{place} has {count} tokens, not 1 to {most:,}")
        arrays: Inputs = {}
        for name, tensor in datum.loss_fn_inputs.items():
            arrays[name] = array_of(tensor, f"{place}: {name}", limit=left)
            left -= arrays[name].size
        targets = arrays.get(TARGETS, MISSING)
        right = targets.dtype == np.int64 and targets.shape[:1] == (count,)
        right = right and 0 < targets[0].size <= limits.targets
        rule = f"must be int64 [{count}] or [{count}, K] with K up to {limits.targets}"
        require(right, f"{place} has {count} tokens: {TARGETS} {rule}")
        inside = all(row.min() >= 0 and row.max() < limits.vocab_size for row in (ids, targets))
        require(inside, f"{place} has a token outside the vocabulary of {limits.vocab_size:,}")
        tokens.append(ids)
        inputs.append(arrays)
    return tokens, inputs


def _columns(name: str, settings: Numbers, inputs: list[Inputs]) -> Values:
    """Return the columns of a loss. Raises UserError if a datum has arrays other than those that
    the loss reads.
    """
    formula = FORMULAS[name]
    numbers = {**formula.settings, **settings}
    keys = {"logprobs" if column == SAMPLED else column: column for column in formula.columns}
    columns: dict[str, list[np.ndarray]] = {key: [] for key in (*keys, *numbers)}
    for number, arrays in enumerate(inputs):
        place = f"datum {number}"
        shape = arrays[TARGETS].shape
        others = sorted(arrays.keys() - keys.keys() - (numbers.keys() & {*CLIP}) - {TARGETS})
        require(not others, f"{place}: {name} does not read {others}")
        single = name == "cross_entropy" or len(shape) == 1
        require(single, f"{place}: {name} has one target for each token")
        for key, parts in columns.items():
            values = np.asarray({**numbers, **arrays}.get(key, MISSING), np.float32)
            if key in numbers and values.size == 1:
                values = np.broadcast_to(values.reshape(()), shape)
            rule = f"must have the shape {[*shape]} of {TARGETS}"
            require(values.shape == shape, f"{place}: {key} {rule}")
            right = np.isfinite(values).all() and (key not in numbers or values.min() >= 0)
            rule = "has a number that is not finite, or a negative threshold"
            require(right, f"{place}: {key} {rule}")
            counted = key != "sequence_ratio_mask" or values.any()
            require(counted, f"{place}: {key} must have an entry other than 0")
            parts.append(values)
    return {keys.get(key, key): _column(parts, 0.0) for key, parts in columns.items()}
