"""Which part of which trainer shard goes where in a generator rank: from shapes and placements alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl.model.parts import Box, Part


@dataclass(frozen=True, slots=True)
class Shard:
    """What one trainer rank holds of one parameter; ``start`` counts elements from its slot's begin."""

    name: str
    shape: tuple[int, ...]
    """Of the whole parameter."""
    box: Box
    start: int


@dataclass(frozen=True, slots=True)
class Route:
    """Copy the part ``box`` of parameter ``name`` out of ``shard``, which trainer rank ``source`` holds."""

    source: int
    shard: Shard
    box: Box


def shards_of(parts: Mapping[str, Part], *, align: int = 64) -> tuple[Shard, ...]:
    """Lay the parts of one rank end to end, each beginning on a multiple of ``align`` elements."""
    shards, start = [], 0
    for name, part in parts.items():
        shards.append(Shard(name, part.shape, part.box, start))
        start += -(-part.box.numel // align) * align
    return tuple(shards)


def plan_routes(sources: Sequence[Sequence[Shard]], destinations: Mapping[str, Part], *, reader: int) -> list[Route]:
    """Routes that fill the parts of the generator rank ``reader``.

    Equal shards on several trainer ranks are read from one of them, a different one per reader and
    parameter. Raises ValueError, naming the parameter, unless every element of every destination is
    covered exactly once and every parameter of the trainer is asked for.
    """
    offered: dict[str, dict[Box, list[tuple[int, Shard]]]] = {}
    for rank, shards in enumerate(sources):
        for shard in shards:
            offered.setdefault(shard.name, {}).setdefault(shard.box, []).append((rank, shard))
    if unknown := sorted(offered.keys() - destinations.keys()):
        raise ValueError(f"parameter {unknown[0]} of the trainer has no place in the generator")
    routes: list[Route] = []
    for index, (name, (_, shape, box)) in enumerate(destinations.items()):
        if name not in offered:
            raise ValueError(f"parameter {name} of the generator is held by no trainer rank")
        parts = []
        for source_box, replicas in offered[name].items():
            rank, shard = replicas[(reader + index) % len(replicas)]
            if shard.shape != shape:
                raise ValueError(f"parameter {name} is {shard.shape} in the trainer and {shape} in the generator")
            if (part := box.intersect(source_box)) is not None:
                parts.append(Route(rank, shard, part))
        _check_partition(name, box, [route.box for route in parts])
        routes += parts
    return routes


def _check_partition(name: str, whole: Box, parts: list[Box]) -> None:
    for i, part in enumerate(parts):
        if any(part.intersect(other) for other in parts[:i]):
            raise ValueError(f"parameter {name}: the trainer's shards overlap at {part}")
    covered = sum(part.numel for part in parts)
    if covered != whole.numel:
        raise ValueError(f"parameter {name}: {covered} of {whole.numel} elements are covered by the trainer's shards")
