"""Adapters in the form of PEFT, which loads them onto a transformers model."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from safetensors.torch import save_file
from torchtitan.components.lora import LoRAConverter

from rl.model.shards import Box
from rl.training.hugging_face_names import HuggingFaceNames
from rl.training.lora import adapted_layers, whole_adapter


def adapter_tensors(model: nn.Module, names: HuggingFaceNames) -> dict[str, torch.Tensor]:
    """PEFT's tensors, whole and float32, on every rank; all ranks call alike. Empty for a model
    without adapters.

    The parts that Hugging Face has of a fused weight share A and have their rows of B.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, layer in adapted_layers(model).items():
        a, b = (tensor.cpu() for tensor in whole_adapter(layer))
        for block in names.blocks(name, tuple(b.shape)):
            module = f"base_model.model.{block.tensor.removesuffix('.weight')}"
            # safetensors refuses to write shared memory
            tensors[f"{module}.lora_A.weight"] = a.clone()
            rows = tensors.setdefault(f"{module}.lora_B.weight", torch.empty(block.shape))
            target = Box(block.offset, block.box.shape).slices_in(Box.whole(block.shape))
            rows[target] = b[block.box.slices_in(Box.whole(tuple(b.shape)))]
    return tensors


def write_adapter(
    folder: Path, tensors: dict[str, torch.Tensor], lora: LoRAConverter.Config, *, base: str | None
) -> None:
    """Make ``folder`` one that PEFT loads onto the model ``base``, None where that is nowhere to be
    found.
    """
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))
