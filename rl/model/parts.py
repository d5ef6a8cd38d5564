"""Rectangular parts of tensors: the language of sharding, routing and digests."""

import math
from typing import NamedTuple

import torch


class Box(NamedTuple):
    """A rectangular part of a tensor: where it starts in the whole, and its size."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "Box":
        """The box that is all of a tensor of ``shape``."""
        return cls((0,) * len(shape), tuple(shape))

    def intersect(self, other: "Box") -> "Box | None":
        """The part common to both, or None."""
        low = tuple(map(max, self.offset, other.offset))
        ends = zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        high = tuple(min(a + n, b + m) for a, n, b, m in ends)
        shape = tuple(end - start for start, end in zip(low, high, strict=True))
        return Box(low, shape) if all(n > 0 for n in shape) else None

    def slices_in(self, outer: "Box") -> tuple[slice, ...]:
        """Index of this box within the tensor that holds ``outer``."""
        starts = (o - p for o, p in zip(self.offset, outer.offset, strict=True))
        return tuple(slice(start, start + n) for start, n in zip(starts, self.shape, strict=True))

    @property
    def numel(self) -> int:
        """Elements inside."""
        return math.prod(self.shape)


class Part(NamedTuple):
    """One rank's own part of a parameter: the tensor, the shape of the whole, and where it lies in it."""

    tensor: torch.Tensor
    shape: tuple[int, ...]
    box: Box


Parts = dict[str, Part]
"""All parameters of one rank by torchtitan's names, tied ones once."""
