"""Sampling masks hold the sets that they were made of, whichever form a set takes."""

import numpy as np
import pytest
import torch

from rl.types.sampling_mask import SamplingMask, encode

SIZES = [1, 2, 3, 4, 5, 60, 99, 100]


def drawn(vocab_size: int = 100) -> torch.Tensor:
    """bool [8, vocab_size], sets of ``SIZES`` ids."""
    order = torch.rand(len(SIZES), vocab_size, generator=torch.Generator().manual_seed(0)).argsort()
    return order < torch.tensor(SIZES).unsqueeze(1)


def sets_of(mask: SamplingMask) -> list[list[int] | None]:
    found = [mask.ids(token) for token in range(len(mask))]
    return [None if ids is None else ids.tolist() for ids in found]


def test_a_set_takes_the_shorter_of_its_forms():
    """100 ids take a bitmap of four words; all of them take none."""
    kept = drawn()
    mask = SamplingMask.of_rows(encode(kept))
    assert mask.sizes.tolist() == [1, 2, 3, 4, -4, -4, -4, 0]
    assert len(mask.words) == 1 + 2 + 3 + 4 + 3 * 4
    assert sets_of(mask) == [*(row.nonzero().flatten().tolist() for row in kept[:-1]), None]


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 64])
def test_every_size_of_vocabulary_has_its_bitmaps(vocab_size):
    kept = torch.ones(vocab_size, vocab_size, dtype=torch.bool).tril()
    found = sets_of(SamplingMask.of_rows(encode(kept)))
    assert found == [*(list(range(size)) for size in range(1, vocab_size)), None]


def test_selected_placed_and_joined_tokens_keep_their_sets():
    mask = SamplingMask.of_rows(encode(drawn()))
    sets = sets_of(mask)
    order = np.array([5, 0, 7, 5, 3])
    assert sets_of(mask.select(order)) == [sets[token] for token in order]
    assert sets_of(mask.select(order[:0])) == []
    few = mask.select(np.array([1, 6]))
    assert sets_of(few.placed(np.array([2, 4]), 6)) == [None, None, sets[1], None, sets[6], None]
    assert sets_of(SamplingMask.joined([few, SamplingMask.whole(1), mask])) == [
        sets[1],
        sets[6],
        None,
        *sets,
    ]


def test_equal_masks_are_those_with_the_same_sets():
    mask = SamplingMask.of_rows(encode(drawn()))
    assert mask == SamplingMask.of_rows(encode(drawn()))
    assert mask != SamplingMask.of_rows(encode(~drawn()))
    assert mask != SamplingMask.whole(len(mask))
