"""Which part of which parameter each trainer rank holds, known before any of them runs."""

import itertools
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement
from torchtitan.distributed import ParallelDims

from rl.compat.torch_internals import part_at
from rl.model.shape import ModelConfig
from rl.model.shards import Box, Layout, Region
from rl.training.config import TrainerConfig
from rl.training.model import named_adapters, named_weights, sharded_model
from rl.types import Head


def trainer_layout(
    config: TrainerConfig, model: ModelConfig, *, head: Head = "logprobs", adapters: bool = False
) -> tuple[Layout, ...]:
    """Return what each rank of the trainer holds, from rank 0 on, as torchtitan shards the model;
    its ``adapters`` too if so.

    Builds rank 0's model without memory, in a process group that is gone afterwards and reaches
    nobody; takes seconds at any size. Raises RuntimeError in a process that is in a group already.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "trainer_layout makes a process group of its own; call it in a process that has none"
        )
    dist.init_process_group("fake", rank=0, world_size=config.ranks)
    try:
        dims = ParallelDims.from_config(config.parallelism, config.ranks)
        built = sharded_model(config, model, dims, head=head, folder="")
        held = {**named_weights(built), **(named_adapters(built) if adapters else {})}
        regions = [_regions(name, parameter, config.ranks) for name, parameter in held.items()]
    finally:
        dist.destroy_process_group()
    return tuple(zip(*regions, strict=True))


def _regions(name: str, parameter: torch.Tensor, ranks: int) -> list[Region]:
    """Return what each of ``ranks`` holds of one parameter."""
    shape = tuple(parameter.shape)
    if not isinstance(parameter, DTensor):
        return [Region(name, shape, Box.whole(shape))] * ranks
    mesh = parameter.device_mesh
    boxes = _boxes(shape, tuple(mesh.shape), tuple(parameter.placements))
    by_rank = dict(zip(mesh.mesh.flatten().tolist(), boxes, strict=True))
    return [Region(name, shape, by_rank[rank]) for rank in range(ranks)]


@cache
def _boxes(
    shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[Placement, ...]
) -> list[Box]:
    """Of a tensor of ``shape``, what each place of a mesh holds, in the mesh's own order; layers
    are alike.
    """
    places = itertools.product(*map(range, mesh))
    held = (part_at(place, shape, mesh, placements) for place in places)
    return [Box(offset, local) for local, offset in held]
