"""Layouts of the trainer's ranks, computed before any of them runs."""

import itertools
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement
from torchtitan.distributed import ParallelDims

from rl.compat.torch_internals import part_at
from rl.model.decoder import in_all_layers
from rl.model.shape import ModelConfig, shape_of
from rl.model.shards import Box, Layout, Region
from rl.training.sharded_model import named_adapters, named_weights, sharded_model
from rl.training.trainer_config import TrainerConfig
from rl.types import Head


def trainer_layout(
    config: TrainerConfig, model: ModelConfig, *, head: Head = "logprobs", adapters: bool = False
) -> tuple[Layout, ...]:
    """Return the layout of each trainer rank, from rank 0 on, as torchtitan shards the model; with
    ``adapters``, also the parameters of adapters.

    Builds the first layers of rank 0's model, in which are all kinds, on the meta device in a
    temporary fake process group. Raises RuntimeError if the process already has a process group.
    """
    if dist.is_initialized():
        raise RuntimeError("trainer_layout: call it in a process without a process group")
    dist.init_process_group("fake", rank=0, world_size=config.ranks)
    try:
        dims = ParallelDims.from_config(config.parallelism, config.ranks)
        built = sharded_model(config, model, dims, head=head, folder="", shortened=True)
        of_some = named_weights(built) | (named_adapters(built) if adapters else {})
        whole = in_all_layers(of_some, shape_of(model).kinds)
        regions = [_regions(name, parameter, config.ranks) for name, parameter in whole.items()]
    finally:
        dist.destroy_process_group()
    return tuple(zip(*regions, strict=True))


def _regions(name: str, parameter: torch.Tensor, ranks: int) -> list[Region]:
    """Return the region of one parameter on each of ``ranks``."""
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
    """Return the box of a tensor of ``shape`` at each place of a mesh, in the mesh's order. Cached,
    since layers have equal shapes.
    """
    places = itertools.product(*map(range, mesh))
    parts = (part_at(shape, mesh, list(place), placements) for place in places)
    return [Box(offset, local) for local, offset in parts]
