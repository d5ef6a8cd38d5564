"""Parts of a trainer rank's shards that travel together: one contiguous blob for each set of
generator ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rl.model.shards import Box, Layout
from rl.weights.routes import plan_push
from rl.weights.transport import starts_of


class BlobPiece(NamedTuple):
    """A part of a trainer rank's region ``held``, and the regions of generator ranks that it goes
    to.
    """

    held: int
    box: Box
    places: tuple[tuple[int, int], ...]
    """Generator rank, and index in its layout."""


@dataclass(frozen=True, slots=True)
class Blob:
    """All that the same generator ranks want of a trainer rank: one transfer for each of them."""

    readers: frozenset[int]
    pieces: tuple[BlobPiece, ...]

    @property
    def numel(self) -> int:
        """Elements, with what lies between pieces to align them."""
        return starts_of([piece.box.numel for piece in self.pieces])[1]

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Each piece within ``memory``, [numel], that holds the blob."""
        sizes = [piece.box.numel for piece in self.pieces]
        starts, _ = starts_of(sizes)
        return [
            memory[start : start + size].view(piece.box.shape)
            for start, size, piece in zip(starts, sizes, self.pieces, strict=True)
        ]


def plan_blobs(sources: Sequence[Layout], wanted: Sequence[Layout]) -> list[list[Blob]]:
    """Blobs of each trainer rank, from the layouts of all of them and of all ranks of a generator.

    Nothing lies in two blobs, so a trainer rank's are no larger than its shards. Raises ValueError
    as plan_push does.
    """
    places: dict[tuple[int, int, Box], list[tuple[int, int]]] = {}
    for reader, routes in enumerate(plan_push(sources, wanted).routes):
        for route in routes:
            places.setdefault((route.source, route.held, route.box), []).append(
                (reader, route.wanted)
            )
    pieces: list[dict[frozenset[int], list[BlobPiece]]] = [{} for _ in sources]
    for (source, held, box), to in places.items():
        readers = frozenset(reader for reader, _ in to)
        pieces[source].setdefault(readers, []).append(BlobPiece(held, box, tuple(to)))
    return [[Blob(readers, tuple(own)) for readers, own in blobs.items()] for blobs in pieces]


def host_memory(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory of the host, [numel], that ``device`` copies from and to; every page was touched."""
    return torch.empty(numel, dtype=dtype, pin_memory=device.type == "cuda").zero_()
