"""Means of the weights of several checkpoints."""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torchtitan.components.checkpointer.base import LR_SCHEDULER, OPTIMIZER

from rl.training.safe_reading import load, read_metadata


def write_average(checkpoints: Sequence[Path], folder: Path) -> None:
    """Write the mean of the weights of ``checkpoints`` of one run to ``folder``, which the engine's
    Checkpointer loads as weights. Means are computed in float64; integers are those of the last.

    Raises RunError if a checkpoint is damaged, and KeyError if one lacks a tensor.
    """
    state: dict[str, torch.Tensor] = {}
    for name, entry in read_metadata(checkpoints[-1]).state_dict_metadata.items():
        is_weight = not name.startswith((f"{OPTIMIZER}.", f"{LR_SCHEDULER}."))
        if not (is_weight and isinstance(entry, TensorStorageMetadata)):
            continue
        values = torch.empty(entry.size, dtype=entry.properties.dtype)
        total = torch.zeros(entry.size, dtype=torch.float64)
        for checkpoint in checkpoints:
            load({name: values}, checkpoint)
            total += values.double()
        is_mean = values.is_floating_point()
        state[name] = (total / len(checkpoints)).to(values.dtype) if is_mean else values
    dcp.save(state, checkpoint_id=folder, no_dist=True)
