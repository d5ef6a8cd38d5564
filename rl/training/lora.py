"""Low-rank adapters (LoRA, arXiv:2106.09685) of linear layers: the weights merged with them, and
their export to PEFT.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.utils import canonical_fqn

from rl.compat.titan import lora_scale
from rl.model.hub import Snapshot
from rl.model.shards import Box, Shards
from rl.training.hugging_face_names import HuggingFaceNames
from rl.training.sharded_model import shards_of
from rl.training.trainer_config import AdapterConfig, Source


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers that have an adapter, by the names of their weights."""
    return {
        canonical_fqn(f"{name}.weight"): module
        for name, module in model.named_modules()
        if hasattr(module, "lora_a")
    }


def whole_adapter(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A [rank, in] and B [out, rank] of an adapted layer, float32. Every rank gathers both,
    which are small.
    """
    weights = (layer.lora_a.weight, layer.lora_b.weight)
    a, b = (w.full_tensor() if isinstance(w, DTensor) else w for w in weights)
    return a.detach().float(), b.detach().float()


class MergedWeights:
    """Shards of the policy's weights on this rank: W + alpha / rank * B @ A for a layer with an
    adapter.

    The shard of a layer without an adapter is the live parameter. The first call of ``shards``
    allocates memory for the merged weights; ``refresh`` updates them. All ranks must call both
    methods together. A rank merges only its own shard, in float32. Tiller's tests do not cover
    CUDA, which runs the same code.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._adapted = adapted_layers(model)
        self.buffers: dict[str, torch.Tensor] = {}
        """Merged weights, by parameter."""
        self.source: Source = None
        """Source of the adapter that is merged."""

    def shards(self) -> Shards:
        """Return the shards by torchtitan's names, in its order; the same tensors each time."""
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
        """Merge again, after the parameters changed."""
        shards = shards_of(self._model)
        for name, merged in self.buffers.items():
            shard = shards[name]
            layer = self._adapted[name]
            a, b = whole_adapter(layer)
            rows, columns = shard.box.slices_in(Box.whole(shard.shape))
            merged.copy_(shard.tensor + lora_scale(layer) * (b[rows] @ a[:, columns]))


def peft_tensors(
    model: nn.Module, names: HuggingFaceNames, config: AdapterConfig | None
) -> dict[str, torch.Tensor]:
    """Return PEFT's tensors of the adapter with ``config``, whole and float32, on every rank; empty
    for a model without adapters. All ranks must call the function together.

    The Hugging Face tensors of a fused weight have the same A; each has its own rows of B.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, layer in adapted_layers(model).items():
        a, b = (tensor.cpu() for tensor in whole_adapter(layer))
        if config is None or not config.adapts(name.replace(".weight", ".lora_a.weight")):
            continue
        a, b = a[: config.rank], b[:, : config.rank]
        for block in names.blocks(name, tuple(b.shape)):
            module = f"base_model.model.{block.tensor.removesuffix('.weight')}"
            # safetensors refuses to write shared memory
            tensors[f"{module}.lora_A.weight"] = a.clone()
            rows = tensors.setdefault(f"{module}.lora_B.weight", torch.empty(block.shape))
            target = Box(block.offset, block.box.shape).slices_in(Box.whole(block.shape))
            rows[target] = b[block.box.slices_in(Box.whole(tuple(b.shape)))]
    return tensors


def write_peft(
    folder: Path, tensors: dict[str, torch.Tensor], adapter: AdapterConfig, *, base: str | None
) -> None:
    """Create ``folder``, an adapter that PEFT loads onto the model ``base``. None means that the
    base is in no folder.
    """
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(Path(base)) if base is not None else None,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    if isinstance(base, Snapshot):
        config |= {"base_model_name_or_path": base.name, "revision": base.commit}
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))
