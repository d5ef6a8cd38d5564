"""Routes cover every element once, or the error names the parameter."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl.model.shards import Box, Layout, Region
from rl.weights.routes import plan_push, plan_routes


def cut(shape: tuple[int, ...], dim: int | None, shards: int, index: int) -> Box:
    if dim is None:
        return Box((0,) * len(shape), shape)
    size = -(-shape[dim] // shards)
    low = min(index * size, shape[dim])
    high = min((index + 1) * size, shape[dim])
    offset = tuple(low if d == dim else 0 for d in range(len(shape)))
    return Box(offset, tuple(high - low if d == dim else n for d, n in enumerate(shape)))


@given(
    rows=st.integers(1, 13),
    columns=st.integers(1, 13),
    source_dim=st.sampled_from([None, 0, 1]),
    sources=st.integers(1, 5),
    dim=st.sampled_from([None, 0, 1]),
    readers=st.integers(1, 4),
)
def test_routes_copy_every_element_to_its_place(rows, columns, source_dim, sources, dim, readers):
    shape = (rows, columns)
    whole = torch.arange(rows * columns).view(shape)
    full = Box.whole(shape)
    boxes = [cut(shape, source_dim, sources, rank) for rank in range(sources)]
    held = [(Region("w", shape, box),) for box in boxes]
    for reader in range(readers):
        box = cut(shape, dim, readers, reader)
        out = torch.full(box.shape, -1)
        for route in plan_routes(held, (Region("w", shape, box),), reader=reader):
            source = boxes[route.source]
            shard = whole[source.slices_in(full)][route.box.slices_in(source)]
            out[route.box.slices_in(box)] = shard
        assert torch.equal(out, whole[box.slices_in(full)])


def replicated(sizes: list[int]) -> Layout:
    return tuple(Region(f"p{i}", (size,), Box.whole((size,))) for i, size in enumerate(sizes))


@pytest.mark.parametrize("sizes", [[4] * 8, [9, 1, 9, 1, 9, 1, 9, 1], [8, *[1] * 8]])
def test_replicas_serve_equal_shares(sizes):
    """This holds even if the sizes repeat with the number of replicas."""
    layout = replicated(sizes)
    for counts in plan_push([layout] * 2, [layout] * 3).elements():
        assert counts[0] == counts[1] == sum(sizes) // 2


def test_readers_begin_with_different_replicas():
    layout = replicated([4])
    sources = [plan_routes([layout] * 4, layout, reader=reader)[0].source for reader in range(4)]
    assert sorted(sources) == [0, 1, 2, 3]
    plan = plan_push([layout] * 4, [layout] * 4)
    assert [routes[0].source for routes in plan.routes] == sources


@pytest.mark.parametrize(
    ("regions", "message"),
    [
        ([Region("w", (4, 2), Box((0, 0), (3, 2)))], "parameter w: 6 of 8 elements are covered"),
        (
            [Region("w", (4, 2), Box((0, 0), (3, 2))), Region("w", (4, 2), Box((2, 0), (2, 2)))],
            "parameter w: the trainer's shards overlap",
        ),
        ([Region("w", (4, 3), Box((0, 0), (4, 3)))], "parameter w is"),
        ([Region("v", (4, 2), Box((0, 0), (4, 2)))], "parameter v of the trainer has no place"),
        ([], "parameter w of the generator is held by no trainer rank"),
    ],
)
def test_a_parameter_that_cannot_be_routed_is_named(regions, message):
    with pytest.raises(ValueError, match=message):
        plan_routes(
            [(region,) for region in regions], (Region("w", (4, 2), Box.whole((4, 2))),), reader=0
        )


def test_a_generator_that_does_not_hold_every_element_is_refused():
    shape = (4, 2)
    trainer = [(Region("w", shape, Box.whole(shape)),)]

    def rows(start: int, stop: int) -> Layout:
        return (Region("w", shape, Box((start, 0), (stop - start, 2))),)

    plan_push(trainer, [rows(0, 2), rows(2, 4), rows(2, 4)])
    with pytest.raises(
        ValueError, match="parameter w: 6 of 8 elements are covered by the generator's shards"
    ):
        plan_push(trainer, [rows(0, 1), rows(1, 3)])
    with pytest.raises(ValueError, match="parameter w: the generator's shards overlap at"):
        plan_push(trainer, [rows(0, 3), rows(2, 4)])


def test_a_plan_describes_the_bytes_between_ranks():
    shape = (6, 2**19)
    held = [(Region("w", shape, cut(shape, 0, 6, rank)),) for rank in range(6)]
    plan = plan_push(held, [(Region("w", shape, cut(shape, 1, 2, rank)),) for rank in range(2)])
    assert plan.elements() == [dict.fromkeys(range(6), 2**18)] * 2
    assert plan.describe(torch.bfloat16).splitlines() == [
        "6 trainer ranks -> 2 generator ranks: 6.0 MiB in torch.bfloat16, 12 routes",
        "reader    routes         MiB  from rank: MiB",
        "     0         6         3.0  0: 0.5, 1: 0.5, 2: 0.5, 3: 0.5, 2 others: 1.0",
        "     1         6         3.0  0: 0.5, 1: 0.5, 2: 0.5, 3: 0.5, 2 others: 1.0",
    ]
