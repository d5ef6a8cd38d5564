"""Snapshots of adapters, read without a trainer."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from rl.training.adapters import ADAPTER
from rl.training.safe_reading import load, read_metadata
from rl.training.sharded_model import adapted_weight, is_adapter
from rl.training.trainer_config import AdapterConfig


def read_snapshot(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A [rank, in] and scale * B [out, rank], whole and float32, of the linear layers that
    the snapshot in ``folder`` adapts, by the names of their weights.

    Raises RunError if ``folder`` holds no adapter, and as :func:`safe_reading.load` does.
    """
    entries = read_metadata(folder).state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(entry.size)
        for name, entry in entries.items()
        if is_adapter(name) and isinstance(entry, TensorStorageMetadata)
    }
    state[ADAPTER] = asdict(AdapterConfig(rank=1))
    load(state, folder, alone=True)
    scale = AdapterConfig(**state.pop(ADAPTER)).scale
    return {
        adapted_weight(name): (a, scale * state[name.replace(".lora_a.", ".lora_b.")])
        for name, a in state.items()
        if ".lora_a." in name
    }
