"""Adapters beside the weights of a generator: each token of a batch is computed with that of its
request.
"""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rl.errors import RunError
from rl.generation.generator_config import BankConfig
from rl.model.shards import Box, Layout

HEAD = "lm_head"
Factors = dict[str, tuple[Tensor, Tensor]]
"""Whole A [rank, in] and scale * B [out, rank] of each adapted weight, by its name."""


class AdapterBank:
    """Adapters of the linear layers of one rank's model: y = W x + B_i A_i x for a token whose
    request has adapter i, y = W x for one without.

    A layer has the matrices of all adapters one after another, A [count * rank, in] and B [out,
    count * rank], so that a batch is two products, with a mask of the own adapter's columns between
    them. Their addresses and the mask's stay, so that graphs can capture the products. The weights
    of the model can change meanwhile.
    """

    def __init__(self, model: Any, layout: Layout, config: BankConfig, *, tokens: int):
        """Add hooks to ``model``, a Qwen3Model, before those that sum over ranks. ``layout`` is
        that of its parameters, and ``tokens`` the maximum number of tokens of a batch.
        """
        weight = model.norm.weight
        size = config.count * config.rank
        self._rank = config.rank
        self._numbers = [0] * config.count
        self._columns = torch.arange(size, device=weight.device) // config.rank
        self._layers = {
            f"{name}.weight": layer
            for name, layer in model.named_modules()
            if name.rpartition(".")[-1] in config.layers
        }
        self._boxes = {
            name: [(box, whole) for other, whole, box in layout if other == name]
            for name in self._layers
        }
        # buffers survive where vLLM drops the weights
        model.register_buffer("adapter_mask", weight.new_zeros(tokens, size), persistent=False)
        self._mask: Tensor = model.adapter_mask
        for name, layer in self._layers.items():
            rows, columns = layer.weight.shape
            layer.register_buffer("adapters_a", weight.new_zeros(size, columns), persistent=False)
            layer.register_buffer("adapters_b", weight.new_zeros(rows, size), persistent=False)
            if name != f"{HEAD}.weight":
                layer.register_forward_hook(self._added, prepend=True)
        self.head = model.lm_head if f"{HEAD}.weight" in self._layers else None
        """Output head, if it has adapters. It is not computed for all tokens, so that the hidden
        states have their products with A behind them: see ``with_head`` and ``head_logits``."""

    def _added(self, layer: Any, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        return out + F.linear(self._inner(layer, args[0]), layer.adapters_b)

    def _inner(self, layer: Any, x: Tensor) -> Tensor:
        return F.linear(x, layer.adapters_a) * self._mask[: x.shape[-2]]

    def with_head(self, hidden: Tensor) -> Tensor:
        """Return hidden states [T, dim], and behind each what the head's adapter makes of it."""
        if self.head is None:
            return hidden
        return torch.cat([hidden, self._inner(self.head, hidden)], -1)

    def without_head(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the hidden states alone, and what the head's adapters add to the logits."""
        if self.head is None:
            return hidden, None
        dim = self.head.weight.shape[1]
        return hidden[:, :dim].contiguous(), F.linear(hidden[:, dim:], self.head.adapters_b)

    def has(self, number: int) -> bool:
        """Return whether adapter ``number`` is there."""
        return number in self._numbers

    def place_of(self, number: int) -> int:
        """Return the place of adapter ``number``, which is there; -1 for 0."""
        return self._numbers.index(number) if number else -1

    def load(self, number: int, place: int, factors: Factors) -> None:
        """Put the adapter ``number`` into a place whose adapter no request uses, unless a later one
        is there.

        Raises RunError if it adapts other layers than the bank.
        """
        if number < self._numbers[place]:
            return
        if factors.keys() != self._layers.keys():
            other = sorted(factors.keys() ^ self._layers.keys())
            raise RunError(f"the adapter has other layers than the generator; one is {other[0]}")
        columns = slice(place * self._rank, (place + 1) * self._rank)
        for name, layer in self._layers.items():
            a, b = factors[name]
            parts = [box.slices_in(Box.whole(whole)) for box, whole in self._boxes[name]]
            rows = torch.cat([b[part[0]] for part in parts])
            layer.adapters_a[columns].copy_(a[:, parts[0][1]])
            layer.adapters_b[: len(rows), columns].copy_(rows)
        self._numbers[place] = number

    def assign(self, places: Sequence[int], counts: Collection[int]) -> None:
        """Note the places of the adapters of a batch's requests, in the order of the model's input,
        and their numbers of tokens. Rows behind them are padding, whose values are not read.
        """
        owners = torch.from_numpy(np.repeat(np.array(places), np.array([*counts])))
        owners = owners.to(self._mask.device, non_blocking=True)
        self._mask[: len(owners)] = owners.unsqueeze(1) == self._columns
