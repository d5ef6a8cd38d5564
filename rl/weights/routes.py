"""Which part of which trainer shard goes where in a generator: from shapes and placements alone."""

from collections.abc import Sequence
from dataclasses import dataclass

from rl.model.parts import Box, Layout


@dataclass(frozen=True, slots=True)
class Route:
    """Copy the part ``box`` of a parameter from trainer rank ``source`` to one rank of a generator."""

    source: int
    held: int
    """Which region of the source's layout it lies in."""
    wanted: int
    """Which region of the reader's layout it goes to."""
    box: Box


def plan_routes(sources: Sequence[Layout], wanted: Layout, *, reader: int) -> list[Route]:
    """Routes that fill the regions ``wanted`` by one generator rank from the trainer ranks' layouts.

    Equal regions on several trainer ranks are read from one of them, a different one per reader and
    region. Raises ValueError, naming the parameter, unless every element wanted is covered exactly
    once and the rank wants something of every parameter of the trainer.
    """
    offered: dict[str, dict[Box, list[tuple[int, int]]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for rank, layout in enumerate(sources):
        for index, (name, shape, box) in enumerate(layout):
            offered.setdefault(name, {}).setdefault(box, []).append((rank, index))
            shapes[name] = shape
    if unknown := sorted(offered.keys() - {region.name for region in wanted}):
        raise ValueError(f"parameter {unknown[0]} of the trainer has no place in the generator")
    routes: list[Route] = []
    for index, (name, shape, box) in enumerate(wanted):
        if name not in offered:
            raise ValueError(f"parameter {name} of the generator is held by no trainer rank")
        if shapes[name] != shape:
            raise ValueError(f"parameter {name} is {shapes[name]} in the trainer and {shape} in the generator")
        parts = []
        for held, replicas in offered[name].items():
            if (part := box.intersect(held)) is not None:
                rank, at = replicas[(reader + index) % len(replicas)]
                parts.append(Route(rank, at, index, part))
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
