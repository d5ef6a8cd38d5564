"""Contiguous blobs of a trainer rank's shards, one for each set of generator ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rl.model.shards import Box, Layout
from rl.weights.routes import plan_push
from rl.weights.transport import starts_of


class BlobPiece(NamedTuple):
    """A part of a trainer rank's region ``held``, and its destinations on generator ranks."""

    held: int
    box: Box
    places: tuple[tuple[int, int], ...]
    """Generator rank, and index in its layout."""


@dataclass(frozen=True, slots=True)
class Blob:
    """All parts of a trainer rank's shards that the same generator ranks read: one transfer for
    each reader.
    """

    readers: frozenset[int]
    pieces: tuple[BlobPiece, ...]

    @property
    def numel(self) -> int:
        """Number of elements, including the padding that aligns the pieces."""
        return starts_of([piece.box.numel for piece in self.pieces])[1]

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return the view of each piece in ``memory``, [numel], which holds the blob."""
        sizes = [piece.box.numel for piece in self.pieces]
        starts, _ = starts_of(sizes)
        return [
            memory[start : start + size].view(piece.box.shape)
            for start, size, piece in zip(starts, sizes, self.pieces, strict=True)
        ]


def plan_blobs(sources: Sequence[Layout], wanted: Sequence[Layout]) -> list[list[Blob]]:
    """Return the blobs of each trainer rank, from the layouts of all trainer ranks and of all ranks
    of a generator.

    No element is in two blobs, so the blobs of a trainer rank are no larger than its shards. Raises
    ValueError as plan_push does.
    """
    places: dict[tuple[int, int, Box], list[tuple[int, int]]] = {}
    for reader, routes in enumerate(plan_push(sources, wanted).routes):
        for route in routes:
            part = (route.source, route.held, route.box)
            places.setdefault(part, []).append((reader, route.wanted))
    blobs: list[dict[frozenset[int], list[BlobPiece]]] = [{} for _ in sources]
    for (source, held, box), to in places.items():
        readers = frozenset(reader for reader, _ in to)
        blobs[source].setdefault(readers, []).append(BlobPiece(held, box, tuple(to)))
    return [[Blob(readers, tuple(pieces)) for readers, pieces in each.items()] for each in blobs]


def host_memory(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate host memory, [numel], that ``device`` copies from and to, and touch every page."""
    return torch.empty(numel, dtype=dtype, pin_memory=device.type == "cuda").zero_()
