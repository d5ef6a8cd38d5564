"""A digest does not depend on the sharding of a parameter, and differs for other values."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.model.digest import digests, merge_digests
from rl.model.shards import Box, Region, Shard


def shard_of(whole: torch.Tensor, box: Box) -> Shard:
    shape = tuple(whole.shape)
    return Shard(Region("w", shape, box), whole[box.slices_in(Box.whole(shape))])


def digest_of(whole: torch.Tensor) -> str:
    return merge_digests([digests([shard_of(whole, Box.whole(tuple(whole.shape)))])])["w"]


@settings(max_examples=50)
@given(st.data())
def test_a_digest_does_not_depend_on_the_sharding(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    boxes = [Box.whole(shape)]
    for dim, size in enumerate(shape):
        cut = data.draw(st.integers(0, size))
        boxes = [
            shard
            for box in boxes
            for shard in (box.slab(dim, 0, cut), box.slab(dim, cut, size - cut))
        ]
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    ranks = [digests([shard_of(whole, box)]) for box in boxes]
    assert merge_digests(ranks)["w"] == digest_of(whole)


def with_one_bit(whole: torch.Tensor) -> torch.Tensor:
    changed = whole.clone()
    changed.view(torch.int16)[3, 5] ^= 1
    return changed


def with_swapped_elements(whole: torch.Tensor) -> torch.Tensor:
    changed = whole.clone()
    changed[1, 2] = whole[7, 9]
    changed[7, 9] = whole[1, 2]
    return changed


OTHERS = {
    "one bit": with_one_bit,
    "two elements swapped": with_swapped_elements,
    "two rows swapped": lambda whole: whole[[1, 0, *range(2, 40)]],
    "two columns swapped": lambda whole: whole[:, [1, 0, *range(2, 30)]],
    "rows shifted": lambda whole: whole.roll(1, 0),
    "negative": lambda whole: -whole,
    "zeros": torch.zeros_like,
}


@pytest.mark.parametrize("change", OTHERS)
def test_other_values_have_another_digest(change):
    whole = torch.randn(40, 30, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    assert digest_of(OTHERS[change](whole)) != digest_of(whole)


def test_a_missing_shard_of_zeros_changes_the_digest():
    whole = torch.zeros(4, 3)
    assert merge_digests([digests([shard_of(whole, Box((0, 0), (3, 3)))])])["w"] != digest_of(whole)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
def test_a_digest_changes_no_value(dtype):
    whole = (torch.rand(5, 7) * 100).to(dtype)
    before = whole.clone()
    digest_of(whole)
    assert torch.equal(whole, before)


def test_replicas_that_differ_are_named():
    box = Box((0,), (4,))
    with pytest.raises(ValueError, match="parameter w: two ranks hold different values"):
        merge_digests([{("w", box): 1}, {("w", box): 2}])
