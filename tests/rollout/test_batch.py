"""A batch has the facts of sampling of each token, and loss weights for sampled tokens only."""

import dataclasses

import numpy as np
import pytest
import torch

from rl.algorithms.batch import make_batch
from rl.metrics import Value
from rl.rollout.rollout_metrics import rollout_metrics
from rl.types import Batch, Rollout
from rl.types.routed_experts import RoutedExperts
from rl.types.sampling_mask import SamplingMask


@pytest.fixture
def groups(rollout):
    return [
        [rollout([1, 2], [7, 8, 9], reward=1.0), rollout([1, 2], [6], reward=0.0)],
        [rollout([4], [5, 5], reward=2.0), rollout([4], [3, 2, 1, 9], reward=4.0)],
    ]


def batch_of(groups: list[list[Rollout]], reduction: str = "token_mean") -> Batch:
    return make_batch(
        [rollout for group in groups for rollout in group], reduction=reduction, max_tokens=8
    )


def test_columns_are_aligned_with_tokens(groups):
    batch = batch_of(groups)
    assert batch.lengths.tolist() == [5, 3, 3, 5]
    assert batch.tokens.tolist() == [1, 2, 7, 8, 9, 1, 2, 6, 4, 5, 5, 4, 3, 2, 1, 9]
    assert batch.loss_weights.tolist() == [0, 0, 1, 1, 1, 0, 0, 1, 0, 1, 1, 0, 1, 1, 1, 1]
    logprobs = batch.columns["behaviour_logprobs"].tolist()
    assert logprobs == [0, 0, -7, -8, -9, 0, 0, -6, 0, -5, -5, 0, -3, -2, -1, -9]
    versions = batch.columns["versions"].tolist()
    assert versions == [-1, -1, 3, 4, 5, -1, -1, 3, -1, 3, 4, -1, 3, 4, 5, 6]
    assert (batch.tokens.dtype, batch.lengths.dtype) == (torch.int64, torch.int64)
    floats = [batch.loss_weights, *batch.columns.values()]
    assert {values.dtype for values in floats} == {torch.float32}


def test_a_rollout_of_two_sequences_weighs_as_much_as_one(rollout):
    single = rollout([1], [7, 8, 9, 5])
    first, second = rollout([1], [7, 8]).sequences + rollout([1, 2, 3], [9, 5]).sequences
    forked = dataclasses.replace(single, sequences=(first, second))
    batch = make_batch([forked, single], reduction="sequence_mean")
    assert batch.lengths.tolist() == [3, 5, 5]
    sums = [weights.sum().item() for weights in batch.loss_weights.split([8, 5])]
    assert sums == pytest.approx([1.0, 1.0])


def test_a_batch_has_the_sampling_masks_of_its_sequences(rollout):
    free = rollout([1, 2], [6, 3])
    mask = SamplingMask.of_rows([np.array([0], dtype=np.int32), np.array([1, 7], dtype=np.int32)])
    (sequence,) = rollout([4], [5, 7]).sequences
    own = dataclasses.replace(sequence, sampling_mask=mask.placed(np.array([1, 2]), 3))
    cut = dataclasses.replace(rollout([4], [5, 7]), sequences=(own,))
    assert make_batch([free]).sampling_mask is None
    batch = make_batch([free, cut])
    assert batch.sampling_mask.sizes.tolist() == [0, 0, 0, 0, 0, 0, 1]
    assert batch.select([1]).sampling_mask == own.sampling_mask
    assert batch.select([1, 0]).sampling_mask.sizes.tolist() == [0, 0, 1, 0, 0, 0, 0]


def test_a_batch_has_the_experts_of_its_sequences(rollout):
    free = rollout([1, 2], [6, 3])
    ids = np.array([[[3, 1]], [[300, 2]], [[65535, 65535]]], dtype=np.uint16)
    (sequence,) = rollout([4], [5, 7]).sequences
    own = dataclasses.replace(sequence, experts=RoutedExperts(ids))
    routed = dataclasses.replace(rollout([4], [5, 7]), sequences=(own,))
    assert make_batch([free]).experts is None
    batch = make_batch([free, routed])
    assert batch.experts.known.tolist() == [False] * 4 + [True, True, False]
    assert batch.select([1]).experts == own.experts
    assert batch.select([1, 0]).experts.ids[1].tolist() == [[300, 2]]
    assert len(batch.select([]).experts) == 0


def test_tokens_between_turns_have_no_weight(rollout):
    (turn,) = rollout([1], [7, 8, 9]).sequences
    turns = dataclasses.replace(turn, sampled=np.array([False, True, False, True]))
    batch = make_batch([dataclasses.replace(rollout([1], [7]), sequences=(turns,))])
    assert batch.loss_mask.tolist() == [False, True, False, True]


@pytest.mark.parametrize("per_token", [False, True], ids=["of rollouts", "of tokens"])
def test_advantages_become_a_column_of_sampled_tokens(groups, per_token):
    rollouts = [rollout for group in groups for rollout in group]
    each = [1.0, -1.0, 2.0, 3.0]
    tokens = [1.0] * 3 + [-1.0] + [2.0] * 2 + [3.0] * 4
    batch = make_batch(rollouts, torch.tensor(tokens if per_token else each))
    column = batch.columns["advantages"].tolist()
    assert column == [0, 0, 1, 1, 1, 0, 0, -1, 0, 2, 2, 0, 3, 3, 3, 3]


def test_a_column_is_spread_over_the_tokens_that_count(groups):
    column = batch_of(groups).scatter(torch.arange(1.0, 11.0))
    assert column.tolist() == [0, 0, 1, 2, 3, 0, 0, 4, 0, 5, 6, 0, 7, 8, 9, 10]


def test_weights_are_those_of_the_reduction(groups):
    batch = batch_of(groups, "sequence_mean")
    sums = [weights.sum().item() for weights in batch.loss_weights.split(batch.lengths.tolist())]
    assert sums == pytest.approx([1.0, 1.0, 1.0, 1.0])
    weights = batch_of(groups, "fixed_length").loss_weights
    assert weights.tolist() == [0, 0, *[1 / 8] * 3, 0, 0, 1 / 8, 0, *[1 / 8] * 2, 0, *[1 / 8] * 4]


def test_selected_rows_keep_their_columns(groups):
    batch = batch_of(groups).select([3, 0])
    assert batch.tokens.tolist() == [4, 3, 2, 1, 9, 1, 2, 7, 8, 9]
    assert batch.columns["versions"].tolist() == [-1, 3, 4, 5, 6, -1, -1, 3, 4, 5]
    assert batch.lengths.tolist() == [5, 5]
    assert len(batch.select([])) == len(batch.select([]).tokens) == 0


def test_metrics_of_a_step(rollout):
    flat = [
        rollout([1], [2, 3], reward=1.0, correct=1.0, words=4.0),
        rollout([1], [2], reward=1.0, words=0.0),
    ]
    mixed = [
        rollout([1], [2] * 5, reward=0.0, words=2.0, finish_reason="length"),
        rollout([1], [], reward=1.0, words=2.0),
    ]
    metrics = rollout_metrics([flat, mixed])
    assert metrics == {
        "reward/mean": 0.75,
        "reward/zero_std_groups": 0.5,
        "reward/correct": 0.25,
        "reward/words": 2.0,
        "completion/length_mean": 2.0,
        "completion/length_p50": 1.0,
        "completion/length_p90": 5.0,
        "completion/length_p99": 5.0,
        "completion/length_max": 5.0,
        "completion/cut_off": 0.25,
    }


def test_a_metric_of_a_score_has_the_reduction_and_the_weight_of_its_own(rollout):
    group = [
        rollout([1], [2], reward=1.0, calls=Value.of(calls, "sum"), speed=Value(calls, "mean", n))
        for calls, n in ((2.0, 1.0), (5.0, 3.0))
    ]
    metrics = rollout_metrics([group])
    assert (metrics["reward/calls"], metrics["reward/speed"]) == (7.0, 4.25)


def test_metrics_of_a_mixture_cover_all_tasks_and_each_task(rollout):
    sort = [rollout([1], [2], reward=r, task="sort", words=4.0) for r in (1.0, 0.0)]
    copy = [
        [rollout([1], [2], reward=r, task="copy", correct=r) for r in pair]
        for pair in ((1.0, 1.0), (0.0, 1.0))
    ]
    metrics = rollout_metrics([sort, *copy])
    whole = {"mean": 4 / 6, "zero_std_groups": 1 / 3, "correct": 0.5, "words": 4.0}
    sorting = {"mean": 0.5, "zero_std_groups": 0.0, "correct": 0.0, "words": 4.0}
    copying = {"mean": 0.75, "zero_std_groups": 0.5, "correct": 0.75}
    assert {name: value for name, value in metrics.items() if name.startswith("reward/")} == {
        **{f"reward/{name}": value for name, value in whole.items()},
        **{f"reward/sort/{name}": value for name, value in sorting.items()},
        **{f"reward/copy/{name}": value for name, value in copying.items()},
    }
