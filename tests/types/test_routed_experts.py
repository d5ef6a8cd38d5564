"""Records of experts keep their tokens, and travel without those that have no record."""

import pickle

import numpy as np
import pytest

from rl.types.routed_experts import RoutedExperts, dtype_of


@pytest.mark.parametrize(("num_experts", "size"), [(4, 1), (255, 1), (256, 2), (300, 2)])
def test_the_smallest_integers_hold_all_experts_and_one_more_number(num_experts, size):
    dtype = dtype_of(num_experts)
    assert dtype.itemsize == size
    assert num_experts - 1 < np.iinfo(dtype).max


@pytest.mark.parametrize("pattern", ["", "1", "0", "00", "0001101", "11010"])
def test_a_pickle_has_the_same_tokens_without_the_leading_ones_that_have_no_record(pattern):
    one = RoutedExperts(np.arange(1000, dtype=np.uint8).reshape(1, 10, 100))
    parts = [one if known == "1" else RoutedExperts.none(1, one) for known in pattern]
    whole = RoutedExperts.joined([one.select(np.arange(0)), *parts])
    pickled = pickle.dumps(whole)
    assert pickle.loads(pickled) == whole
    assert pickle.loads(pickled).ids.dtype == np.uint8
    assert len(pickled) < 500 + 1000 * len(pattern.lstrip("0"))
