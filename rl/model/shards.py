"""Rectangular shards of tensors, which sharding, routing and digests work with."""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor


class Box(NamedTuple):
    """A rectangular part of a tensor: where it starts in the whole, and its size."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "Box":
        """Return the box that covers a tensor of ``shape``."""
        return cls((0,) * len(shape), tuple(shape))

    def intersect(self, other: "Box") -> "Box | None":
        """Return the common part of both boxes, or None."""
        low = tuple(map(max, self.offset, other.offset))
        ends = zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        high = tuple(min(a + n, b + m) for a, n, b, m in ends)
        shape = tuple(end - start for start, end in zip(low, high, strict=True))
        return Box(low, shape) if all(n > 0 for n in shape) else None

    def slices_in(self, outer: "Box") -> tuple[slice, ...]:
        """Return the index of this box within a tensor that holds ``outer``."""
        starts = (o - p for o, p in zip(self.offset, outer.offset, strict=True))
        return tuple(slice(start, start + n) for start, n in zip(starts, self.shape, strict=True))

    def slab(self, dim: int, start: int, size: int) -> "Box":
        """Return the part of this box from ``start`` to ``start + size`` along dimension ``dim``,
        counted from the start of the box.
        """
        offset = tuple(o + start if d == dim else o for d, o in enumerate(self.offset))
        return Box(offset, tuple(size if d == dim else n for d, n in enumerate(self.shape)))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class Region(NamedTuple):
    """Part of a parameter that a rank holds."""

    name: str
    """Parameter name of torchtitan; a tied parameter has one name."""
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    box: Box


Layout = tuple[Region, ...]
"""Regions that one rank holds, in the rank's own order."""


class Shard(NamedTuple):
    """A region and the tensor that holds it; the tensor has the shape of the box."""

    region: Region
    tensor: torch.Tensor

    @property
    def name(self) -> str:
        return self.region.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.region.shape

    @property
    def box(self) -> Box:
        return self.region.box

    def part(self, box: Box) -> torch.Tensor:
        """Return a view of the part ``box`` of the whole, which lies within this shard."""
        return self.tensor[box.slices_in(self.box)]


Shards = dict[str, Shard]
"""Shards of a rank, by parameter name, if the rank holds one shard of each parameter."""


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of ``tensor``, through which gradients flow."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole ``tensor``. All ranks must call it together if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_shapes(layout: Layout) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter's local tensor, by name. The local tensor stacks the
    rank's regions of the parameter along dimension 0.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, _, box in layout:
        above = shapes[name][0] if name in shapes else 0
        shapes[name] = (above + box.shape[0], *box.shape[1:])
    return shapes


def local_shards(tensors: Mapping[str, torch.Tensor], layout: Layout) -> list[Shard]:
    """Return views of ``tensors`` for the regions of ``layout``, which are stacked as in
    ``local_shapes``. Rows below the last region belong to no region.
    """
    shards = []
    ends = dict.fromkeys(tensors, 0)
    for region in layout:
        start = ends[region.name]
        rows = region.box.shape[0]
        shards.append(Shard(region, tensors[region.name][start : start + rows]))
        ends[region.name] += rows
    return shards


def layout_of(shards: Iterable[Shard]) -> Layout:
    """Return the regions of ``shards``, in order."""
    return tuple(shard.region for shard in shards)
