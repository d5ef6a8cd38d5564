"""Updates of weights, and what a coarser dtype keeps of them."""

from collections.abc import Iterable
from typing import NamedTuple

import torch

CHUNK = 2**22
"""Number of weights that are compared at a time."""
SAMPLED = 2**12
"""Approximate number of elements of a tensor in a sample."""


class Update(NamedTuple):
    """Sums over weights of a model."""

    weights: int = 0
    changed: int = 0
    """Number of weights whose cast changed."""
    kept: float = 0.0
    """Sum of change times change of the cast."""
    square: float = 0.0
    """Sum of the squares of changes."""

    @classmethod
    def of(cls, before: torch.Tensor, after: torch.Tensor, dtype: torch.dtype) -> "Update":
        """Return the update from ``before`` to ``after``, of which ``dtype`` is the cast."""
        total = cls()
        parts = (tensor.reshape(-1).split(CHUNK) for tensor in (before, after))
        for old, new in zip(*parts, strict=True):
            change = new.float() - old.float()
            cast = new.to(dtype).float() - old.to(dtype).float()
            product, square = ((change * term).sum(dtype=torch.float64) for term in (cast, change))
            update = cls(len(old), int(cast.count_nonzero()), float(product), float(square))
            total = cls.total([total, update])
        return total

    @classmethod
    def total(cls, updates: Iterable["Update"]) -> "Update":
        """Return the sum of ``updates``."""
        return cls(*map(sum, zip(cls(), *updates, strict=True)))

    @property
    def share(self) -> float:
        """Part of the update that is left after the cast: its projection on the update. 0 if every
        change is rounded away, and 1 if none is or the roundings cancel out.
        """
        return self.kept / self.square if self.square else 1.0

    @property
    def loses_most(self) -> bool:
        """Whether the cast rounds most of the update away."""
        return self.share < 0.5

    def describe(self) -> str:
        """Return a sentence on an export; empty if nothing is known of the weights before."""
        if not self.weights:
            return ""
        changed = f"training changed {self.changed / self.weights:.1%} of the exported weights"
        if not self.loses_most:
            return changed
        return (
            f"{changed}; their dtype keeps {max(self.share, 0):.0%} of the update and rounds the "
            "rest away: python -m rl.export --dtype float32 keeps all of it"
        )


EMPTY = Update()


def sample(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return copies of elements of ``tensors``, float32 [N], evenly spaced in each tensor."""
    flat = [tensor.detach().flatten() for tensor in tensors]
    # an odd distance, so that the elements are of different columns
    return torch.cat([elements[:: len(elements) // SAMPLED | 1].float() for elements in flat])
