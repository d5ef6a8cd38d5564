"""Routes from trainer shards to generator shards, computed from shapes and placements alone, and
the memory that carries them.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from rl.errors import counted
from rl.model.shards import Box, Layout

ALIGN = 64
"""Alignment of regions in a buffer, in elements, for whole cache lines and vector loads."""
SHOWN = 4  # trainer ranks that a line of a plan's table names


@dataclass(frozen=True, slots=True)
class Route:
    """Copy the part ``box`` of a parameter from trainer rank ``source`` to one rank of a
    generator.
    """

    source: int
    held: int
    """Index of the region in the source's layout."""
    wanted: int
    """Index of the region in the reader's layout."""
    box: Box


@dataclass(frozen=True, slots=True)
class PushPlan:
    """All routes from a trainer to one generator."""

    trainer_ranks: int
    routes: tuple[list[Route], ...]
    """Routes by generator rank."""

    def elements(self) -> list[Counter[int]]:
        """Return by generator rank the number of elements that it reads from each trainer rank."""
        counts: list[Counter[int]] = [Counter() for _ in self.routes]
        for count, routes in zip(counts, self.routes, strict=True):
            for route in routes:
                count[route.source] += route.box.numel
        return counts

    def describe(self, dtype: torch.dtype) -> str:
        """Return a readable table: MiB of ``dtype`` that each generator rank reads, and the trainer
        ranks that it reads most from.
        """

        def mib(count: int) -> str:
            return f"{count * dtype.itemsize / 2**20:,.1f}"

        elements = self.elements()
        lines = [
            f"{counted(self.trainer_ranks, 'trainer rank')} -> "
            f"{counted(len(self.routes), 'generator rank')}: "
            f"{mib(sum(counts.total() for counts in elements))} MiB in {dtype}, "
            f"{sum(map(len, self.routes)):,} routes",
            "reader    routes         MiB  from rank: MiB",
        ]
        for reader, (counts, routes) in enumerate(zip(elements, self.routes, strict=True)):
            largest = dict(counts.most_common(SHOWN))
            origins = [f"{rank}: {mib(largest[rank])}" for rank in sorted(largest)]
            if others := len(counts) - len(largest):
                origins.append(f"{others} others: {mib(counts.total() - sum(largest.values()))}")
            lines.append(
                f"{reader:6}  {len(routes):8,}  {mib(counts.total()):>10}  {', '.join(origins)}"
            )
        return "\n".join(lines)


def plan_push(sources: Sequence[Layout], wanted: Sequence[Layout]) -> PushPlan:
    """Return the plan from all trainer ranks' layouts to those of a generator's ranks.

    Raises ValueError, naming the parameter, unless the trainer's shards fill every region exactly
    once and the generator's regions together hold every element.
    """
    routes = tuple(_routes(_offers(sources), layout, rank) for rank, layout in enumerate(wanted))
    for name, (shape, boxes) in _offers(wanted).items():
        _check_partition(name, tuple(boxes), Box.whole(shape), "generator")
    return PushPlan(len(sources), routes)


def plan_routes(sources: Sequence[Layout], wanted: Layout, *, reader: int) -> list[Route]:
    """Return the routes that fill the regions ``wanted`` by one generator rank from the trainer
    ranks' layouts.

    If several trainer ranks hold equal regions, a region is read from the rank with the least to
    send so far; among equal ranks, the choice differs by ``reader``. Raises ValueError, naming the
    parameter, unless every wanted element is covered exactly once and the rank wants a part of
    every parameter of the trainer.
    """
    return _routes(_offers(sources), wanted, reader)


_Offers = dict[str, tuple[tuple[int, ...], dict[Box, list[tuple[int, int]]]]]
"""Shape of the whole parameter by name, and the holders of each box as (rank, index in layout)."""


def _offers(layouts: Sequence[Layout]) -> _Offers:
    offers: _Offers = {}
    for rank, layout in enumerate(layouts):
        for index, (name, shape, box) in enumerate(layout):
            known, holders = offers.setdefault(name, (shape, {}))
            if known != shape:
                raise ValueError(
                    f"parameter {name} is {known} on one rank and {shape} on rank {rank}"
                )
            holders.setdefault(box, []).append((rank, index))
    return offers


def _routes(offers: _Offers, wanted: Layout, reader: int) -> list[Route]:
    if unknown := sorted(offers.keys() - {region.name for region in wanted}):
        raise ValueError(f"parameter {unknown[0]} of the trainer has no place in the generator")
    routes: list[Route] = []
    load: Counter[int] = Counter()  # elements by source
    for index, (name, shape, box) in enumerate(wanted):
        if name not in offers:
            raise ValueError(f"parameter {name} of the generator is held by no trainer rank")
        whole, holders = offers[name]
        if whole != shape:
            raise ValueError(
                f"parameter {name} is {whole} in the trainer and {shape} in the generator"
            )
        boxes = tuple(holders)
        _check_partition(name, boxes, box, "trainer")
        for source_box, shard in _pieces(boxes, box):
            replicas = holders[source_box]
            first = (reader + index) % len(replicas)
            rotated = replicas[first:] + replicas[:first]
            source, at = min(rotated, key=lambda replica: load[replica[0]])
            load[source] += shard.numel
            routes.append(Route(source, at, index, shard))
    return routes


def _check_partition(name: str, boxes: tuple[Box, ...], whole: Box, owner: str) -> None:
    if (overlap := _overlap(boxes)) is not None:
        raise ValueError(f"parameter {name}: the {owner}'s shards overlap at {overlap}")
    covered = sum(shard.numel for _, shard in _pieces(boxes, whole))
    if covered != whole.numel:
        covers = f"{covered} of {whole.numel} elements are covered by the {owner}'s shards"
        raise ValueError(f"parameter {name}: {covers}")


# cached: all layers of a model have the same boxes


@cache
def _overlap(boxes: tuple[Box, ...]) -> Box | None:
    """Return the intersection of two of the boxes, if any two have one."""
    return next(filter(None, (a.intersect(b) for a, b in itertools.combinations(boxes, 2))), None)


@cache
def _pieces(boxes: tuple[Box, ...], whole: Box) -> list[tuple[Box, Box]]:
    """Return the boxes that overlap ``whole``, each with its overlap."""
    return [(box, shard) for box in boxes if (shard := box.intersect(whole)) is not None]


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
        return packed_numel([piece.box for piece in self.pieces])

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return the view of each piece in ``memory``, [numel], which holds the blob."""
        return packed_views(memory, [piece.box for piece in self.pieces])


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
    for (source, index, box), to in places.items():
        readers = frozenset(reader for reader, _ in to)
        blobs[source].setdefault(readers, []).append(BlobPiece(index, box, tuple(to)))
    return [[Blob(readers, tuple(pieces)) for readers, pieces in group.items()] for group in blobs]


def packed_numel(boxes: Sequence[Box]) -> int:
    """Return the number of elements of memory in which each of ``boxes`` begins aligned."""
    return sum(-(-box.numel // ALIGN) * ALIGN for box in boxes)


def packed_views(memory: torch.Tensor, boxes: Sequence[Box]) -> list[torch.Tensor]:
    """Return the view of each of ``boxes``, one after another, in ``memory``, [packed_numel]."""
    starts = itertools.accumulate((packed_numel([box]) for box in boxes), initial=0)
    return [
        memory[start : start + box.numel].view(box.shape)
        for start, box in zip(starts, boxes, strict=False)
    ]
