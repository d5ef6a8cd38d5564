"""Experts that computed the tokens of requests in one rank's vLLM engine.

The router of each layer writes its choice into a buffer on the device, a row for each token of the
step. After the step the rows go to the host, into a store with a row for each slot of the KV cache.
A token whose keys and values are cached thereby has the experts that computed these.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from rl.compat.vllm_internals import Computed, Slots, Stretch, follow_steps
from rl.errors import RunError
from rl.model.shape import ModelShape
from rl.types.routed_experts import RoutedExperts, dtype_of


def keep_choices(model: Any, shape: ModelShape, *, tokens: int) -> torch.Tensor:
    """Make the routers of ``model``, a Qwen3Model of torchtitan, write the experts of each forward
    pass into the returned buffer, [tokens, layers, experts per token].

    This neither synchronizes nor allocates in a forward pass, so that graphs can capture it. No
    test runs CUDA.
    """
    dtype = getattr(torch, dtype_of(shape.num_experts).name)
    buffer = torch.zeros((tokens, shape.n_layers, shape.experts_per_token), dtype=dtype)
    for index, layer in enumerate(model.layers.values()):
        layer.moe.router.on_choice = partial(_write, buffer, index)
    return buffer


def _write(buffer: torch.Tensor, layer: int, chosen: torch.Tensor, _scores: torch.Tensor) -> None:
    buffer[: chosen.shape[1], layer] = chosen[0]


@dataclass(slots=True, eq=False)
class _Record:
    """Record of a request from the position ``first`` of its prompt."""

    first: int
    rows: list[np.ndarray] = field(default_factory=list)
    """Experts of the tokens that no earlier draw followed, for each draw."""


class ExpertRecords:
    """Experts of the tokens of requests in flight in a ``LLMEngine`` of this process.

    A token has the experts that computed it when the token after it was drawn. A prompt has those
    with which its keys and values were computed that the first draw attended to.
    """

    def __init__(self, engine: Any, buffer: torch.Tensor):
        """``buffer`` is that of ``keep_choices``."""
        self._buffer = buffer
        on_gpu = buffer.is_cuda
        self._rows = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu", pin_memory=on_gpu)
        self._slots = Slots(engine)
        self._nobody = RoutedExperts(self._rows[:0].numpy())
        freed = self._slots.freed
        self._store = np.empty((self._slots.count, *buffer.shape[1:]), self._nobody.ids.dtype)
        self._store[freed] = RoutedExperts.none(freed.stop - freed.start, self._nobody).ids
        self._records = dict[str, _Record]()
        follow_steps(engine, self._keep)

    def begin(self, name: str, first: int) -> None:
        """Record the tokens of the request ``name`` from the position ``first`` of its prompt."""
        self._records[name] = _Record(first)

    def end(self, name: str, drawn: int) -> RoutedExperts:
        """Return the experts of the prompt and of the ``drawn`` tokens of a request, and forget it.

        Raises RunError if a token was drawn without a record.
        """
        record = self._records.pop(name)
        if len(record.rows) != drawn:
            raise RunError(f"{drawn} tokens have the experts of {len(record.rows)} draws")
        head, last = (RoutedExperts.none(count, self._nobody) for count in (record.first, 1))
        return RoutedExperts.joined([head, *map(RoutedExperts, record.rows), last])

    def drop(self, name: str) -> None:
        """Forget a request."""
        self._records.pop(name, None)

    def _keep(self, computed: list[Computed]) -> None:
        """Store what a step has computed; record that from which tokens were drawn."""
        stretches = [request.tokens for request in computed]
        ends = np.cumsum([tokens.end - tokens.begin for tokens in stretches]).tolist()
        count = ends[-1] if ends else 0
        rows = self._rows[:count].copy_(self._buffer[:count]).numpy()
        self._store[self._slots.of(stretches)] = rows
        for (tokens, draws), end in zip(computed, ends, strict=True):
            record = self._records.get(tokens.name)
            if record is None or not draws:
                continue
            if record.rows:
                record.rows.append(rows[end - 1 : end].copy())
            else:
                whole = Stretch(tokens.name, record.first, tokens.end)
                record.rows.append(self._store[self._slots.of([whole])])
