"""Division and clipping of the gradient."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from rl.compat.torch_internals import local_tensor, norms, scale
from rl.training.offloaded_optimizers import OffloadedOptimizers

SAMPLED = 2**14
"""Number of elements of a parameter that are compared."""


@torch.no_grad()
def divide_and_clip(parameters: Iterable[nn.Parameter], weight: float, max_norm: float) -> float:
    """Divide the gradient by ``weight`` and scale it to a norm of at most ``max_norm``. Return the
    norm before clipping, over all ranks.

    Reads the gradient once and writes it once, with one all-reduce and one wait for the device.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = _norm(gradients) / weight
    factor = min(max_norm / (norm + 1e-6), 1.0)
    scale([local_tensor(gradient) for gradient in gradients], factor / weight)
    return norm


def optimizer_state(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]
) -> list[torch.Tensor]:
    """Return the gradients and the moments that are not in host memory all the time, without
    numbers such as counts of steps.
    """
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    on_device = () if isinstance(optimizers, OffloadedOptimizers) else optimizers
    states = [state for optimizer in on_device for state in optimizer.state.values()]
    return [*gradients, *(value for state in states for value in state.values() if value.dim())]


def rounding_elements(model: nn.Module) -> list[torch.Tensor]:
    """Return copies of at most ``SAMPLED`` elements of each trained parameter whose dtype may round
    an update away.
    """
    local = [local_tensor(parameter) for parameter in model.parameters() if parameter.requires_grad]
    rough = [shard.detach().flatten() for shard in local if shard.dtype != torch.float32]
    return [values[:: max(1, len(values) // SAMPLED)].clone() for values in rough]


def have_changed(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    """Whether any element changed on any rank; True if there are no elements."""
    if not before:
        return True
    changed = torch.tensor(not all(map(torch.equal, before, after)), device=before[0].device).int()
    if dist.get_world_size() > 1:
        dist.all_reduce(changed)
    return bool(changed > 0)


@contextmanager
def overridden(groups: list[dict[str, Any]], overrides: Mapping[str, Any]) -> Iterator[None]:
    """Replace hyperparameters of parameter groups inside the block by those of ``overrides`` that
    are not None.
    """
    overrides = {name: value for name, value in overrides.items() if value is not None}
    before = [{name: group[name] for name in overrides} for group in groups]
    for group in groups:
        group.update(overrides)
    yield
    for group, values in zip(groups, before, strict=True):
        group.update(values)


def _norm(gradients: list[torch.Tensor]) -> float:
    """Return the norm of the whole gradient. A shard that several ranks hold counts once."""
    ranks = dist.get_world_size()
    by_copies = defaultdict[int, list[torch.Tensor]](list)
    for gradient in gradients:
        by_copies[ranks // _shards(gradient)].append(local_tensor(gradient))
    squares = [norms(parts).double().square().sum() / copies for copies, parts in by_copies.items()]
    total = torch.stack(squares).sum()
    if ranks > 1:
        dist.all_reduce(total)
    return total.sqrt().item()


def _shards(gradient: torch.Tensor) -> int:
    """Return the number of different shards of ``gradient``."""
    if not isinstance(gradient, DTensor):
        return 1
    places = zip(gradient.device_mesh.shape, gradient.placements, strict=True)
    return math.prod(size for size, placement in places if not placement.is_replicate())
