"""Low-rank adapters (LoRA, arXiv:2106.09685) beside the policy's linear layers, and the weights
that they come to.
"""

from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.lora import LoRAConverter

from rl.model.shards import Box, Shards
from rl.training.model import shards_of


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """The layers that have an adapter, by the names of their weights."""
    return {
        canonical_fqn(f"{name}.weight"): module
        for name, module in model.named_modules()
        if hasattr(module, "lora_a")
    }


def whole_adapter(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A [rank, in] and B [out, rank] of an adapted layer, float32; they are small, so that every
    rank gathers both.
    """
    return _whole(layer.lora_a.weight), _whole(layer.lora_b.weight)


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    return (
        (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().float()
    )


class MergedWeights:
    """This rank's shards of the weights that the policy acts by: W + alpha / rank * B @ A where
    there is an adapter.

    Layers without one are the live parameters themselves. The others have memory of their own from
    the first call of ``shards`` on, into which ``refresh`` merges anew; all ranks call both alike.
    A rank merges its own shard alone, in float32. CUDA takes the same lines and is not covered by
    the tests.
    """

    def __init__(self, model: nn.Module, lora: LoRAConverter.Config | None):
        self._model = model
        self._adapted = adapted_layers(model)
        self._scaling = lora.alpha / lora.rank if lora is not None else 0.0
        self.buffers: dict[str, torch.Tensor] = {}
        """The memory of its own, by parameter."""

    def shards(self) -> Shards:
        """The shards by torchtitan's names, in its order; the same tensors each time."""
        shards = shards_of(self._model)
        if not self.buffers:
            self.buffers = {name: torch.empty_like(shards[name].tensor) for name in self._adapted}
            self.refresh()
        return {
            name: shard._replace(tensor=self.buffers.get(name, shard.tensor))
            for name, shard in shards.items()
        }

    @torch.no_grad()
    def refresh(self) -> None:
        """Follow the parameters, which have changed."""
        shards = shards_of(self._model)
        for name, merged in self.buffers.items():
            layer = self._adapted[name]
            shard = shards[name]
            (a, b) = whole_adapter(layer)
            (rows, columns) = shard.box.slices_in(Box.whole(shard.shape))
            merged.copy_(shard.tensor + self._scaling * (b[rows] @ a[:, columns]))
