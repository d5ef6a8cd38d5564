"""However a batch is cut, every token is predicted once, in its document and the budget."""

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask
from torchtitan.config import CompileConfig

from rl.training.attention import tree_mask
from rl.training.micro_batches import lay_out
from rl.training.packing import MicroBatchLimits, plan, shares_of
from rl.training.trainer_config import TrainerConfig
from rl.types import Batch
from rl.types.routed_experts import RoutedExperts

LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=12)
CUTTINGS = st.builds(
    MicroBatchLimits,
    sequences=st.integers(1, 5),
    tokens=st.none() | st.integers(24, 80),
    pack=st.booleans(),
    one_row=st.booleans(),
    multiple_of=st.sampled_from([1, 2, 8]),
    compiled=st.booleans(),
    align=st.sampled_from([1, 4]),
)


def batch_of(lengths: list[int]) -> Batch:
    """Every token is its place in the batch, and its weight too, except for first tokens."""
    places = torch.arange(sum(lengths))
    first = torch.cat([torch.arange(length) == 0 for length in lengths])
    return Batch(
        tokens=places,
        lengths=torch.tensor(lengths),
        loss_weights=places.float().masked_fill(first, 0.0),
        columns={"place": places.float()},
    )


def micro_batches(batch, limits):
    return [lay_out(batch, rows, limits) for rows in plan(batch, limits)]


@given(LENGTHS, CUTTINGS)
def test_every_token_is_predicted_once_from_the_one_before_it(lengths, limits):
    batch = batch_of(lengths)
    seen = []
    for micro in micro_batches(batch, limits):
        predicted = ~micro.first
        places = micro.index[predicted]
        assert torch.equal(micro.targets.flatten()[micro.cells][predicted], places)
        assert torch.equal(micro.tokens.flatten()[micro.cells][predicted], places - 1)
        seen += micro.index.tolist()
        assert torch.equal(
            micro.per_token(micro.targets.float()), torch.where(predicted, micro.index, 0).float()
        )
    assert sorted(seen) == list(range(len(batch.tokens)))


@given(LENGTHS, CUTTINGS)
def test_positions_of_each_sequence_start_at_zero_and_padding_is_separate(lengths, limits):
    batch = batch_of(lengths)
    starts = set((batch.lengths.cumsum(0) - batch.lengths).tolist())
    for micro in micro_batches(batch, limits):
        document = (micro.positions == 0).flatten().cumsum(0).view(micro.positions.shape)
        used = torch.zeros(micro.tokens.numel(), dtype=torch.bool)
        used[micro.cells[~micro.first]] = True
        own = micro.tokens[used.view(micro.tokens.shape)]
        cells = (used.view(document.shape) & (micro.positions == 0)).flatten().nonzero()
        assert (cells % micro.tokens.shape[1] % limits.align == 0).all()
        begins = torch.tensor(
            [max(s for s in starts if s <= t) for t in own.tolist()], dtype=torch.int64
        )
        assert torch.equal(micro.positions[used.view(micro.tokens.shape)], own - begins)
        owners = {}
        for number, begin in zip(
            document[used.view(document.shape)].tolist(), begins.tolist(), strict=True
        ):
            assert owners.setdefault(number, begin) == begin
        assert len(set(owners.values())) == len(owners)
        assert owners.keys().isdisjoint(document[~used.view(document.shape)].tolist())


@given(LENGTHS, CUTTINGS)
def test_tokens_that_count_have_their_weights_columns_and_sequences(lengths, limits):
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    for micro in micro_batches(batch_of(lengths), limits):
        places = micro.index[micro.loss_index]
        assert torch.equal(micro.loss_weights, places.float())
        assert torch.equal(micro.columns["place"], places.float())
        assert (torch.isin(micro.index, places) | micro.first).all()
        pairs = {*zip(micro.sequence.tolist(), owner[places].tolist(), strict=True)}
        assert len({number for number, _ in pairs}) == len({own for _, own in pairs}) == len(pairs)
        assert all(0 <= number < len(lengths) for number, _ in pairs)


@given(LENGTHS, CUTTINGS)
def test_micro_batches_keep_to_the_limit(lengths, limits):
    for rows in plan(batch_of(lengths), limits):
        micro = lay_out(batch_of(lengths), rows, limits)
        count = sum(len(row) for row in rows)
        assert micro.tokens.shape[1] % limits.multiple_of == 0
        if limits.tokens is None:
            assert count <= limits.sequences
        else:
            assert count == 1 or micro.tokens.numel() <= limits.tokens
        if not limits.pack:
            assert all(len(row) == 1 for row in rows)


@given(LENGTHS.filter(lambda lengths: len(lengths) % 2 == 0), CUTTINGS, st.integers(1, 3))
def test_a_pair_that_belongs_together_is_in_one_micro_batch(lengths, limits, sharing):
    batch = replace(batch_of(lengths), together=2)
    found = []
    for rows in plan(batch, replace(limits, sharing=sharing)):
        own = [sequence for row in rows for tree in row for sequence in tree.sequences]
        assert all(
            (first % 2, second) == (0, first + 1)
            for first, second in zip(own[::2], own[1::2], strict=True)
        )
        micro = lay_out(batch, rows, limits)
        if len(own) > 2:
            assert (
                len(own) <= limits.sequences
                if limits.tokens is None
                else micro.tokens.numel() <= limits.tokens
            )
        assert limits.pack or all(len(row) == len(row[0].sequences) == 1 for row in rows)
        predicted = ~micro.first
        cells = micro.targets.flatten()[micro.cells]
        assert torch.equal(cells[predicted], micro.index[predicted])
        found += own
    assert sorted(found) == [*range(len(lengths))]


@given(LENGTHS, CUTTINGS)
def test_cells_have_the_experts_of_their_inputs(lengths, limits):
    """Experts name the token and its layer; every fifth token has none."""
    batch = batch_of(lengths)
    ids = (torch.arange(2) + 2 * batch.tokens.unsqueeze(1)).unsqueeze(2).numpy()
    ids = ids.astype(np.uint16)
    ids[::5] = 65535
    for micro in micro_batches(replace(batch, experts=RoutedExperts(ids)), limits):
        places = micro.index[~micro.first] - 1
        wanted = torch.from_numpy(ids.astype(np.int16))[places]
        assert torch.equal(micro.experts.flatten(0, 1)[micro.cells[~micro.first]], wanted)
        filled = torch.zeros(micro.tokens.numel(), dtype=torch.bool)
        filled[micro.cells[~micro.first]] = True
        assert (micro.experts.flatten(0, 1)[~filled] == -1).all()


def test_a_shared_cell_has_the_first_record_of_its_sequences():
    """The longest sequence is the first. The records of a token are the number of its sequence."""
    limits = MicroBatchLimits(
        sequences=3, tokens=None, pack=True, one_row=True, multiple_of=1, sharing=3
    )
    batch = batch_of([7, 5, 6])
    prompts = [0, 1, 2, 7, 8, 9, 12, 13, 14]
    tokens, weights = batch.tokens.clone(), batch.loss_weights.clone()
    tokens[prompts] = torch.tensor([90, 91, 92] * 3)
    weights[prompts] = 0.0
    ids = np.repeat([1, 2, 3], [7, 5, 6]).astype(np.uint8).reshape(-1, 1, 1)
    ids[[0, 1, 12]] = 255
    records = RoutedExperts(ids)
    shared = replace(batch, tokens=tokens, loss_weights=weights, experts=records)
    (rows,) = plan(shared, limits)
    found = lay_out(shared, rows, limits).experts.flatten().tolist()
    assert found == [2, 3, 1, 1, 1, 1, 3, 3, 3, 2, 2]


def test_packing_fills_rows_that_padding_would_waste():
    batch = batch_of([17, 9, 9, 5, 5, 5, 5])
    packed, padded = (
        lay_out(batch, plan(batch, limits)[0], limits)
        for limits in (
            MicroBatchLimits(sequences=7, tokens=None, pack=pack, one_row=False, multiple_of=1)
            for pack in (True, False)
        )
    )
    assert packed.tokens.shape == (3, 16)
    assert padded.tokens.shape == (7, 16)


@pytest.mark.parametrize("one_row", [True, False])
def test_a_short_sequence_goes_to_the_row_that_it_leaves_the_least_room_in(one_row):
    limits = MicroBatchLimits(sequences=1, tokens=20, pack=True, one_row=one_row, multiple_of=1)
    planned = plan(batch_of([17, 15, 14, 7, 5, 4]), limits)
    # 16, 14, 13, 6, 4 and 3 cells
    rows = [[[tree.sequences[0] for tree in row] for row in rows] for rows in planned]
    if one_row:
        assert rows == [[[0, 4]], [[1, 3]], [[2, 5]]]
    else:  # the rows of the first three are as long as these
        assert rows == [[[0]], [[1]], [[2]], [[3], [4], [5]]]


def test_best_fit_needs_few_more_micro_batches_than_the_tokens_do():
    draw = torch.Generator().manual_seed(0)
    batch = batch_of(torch.randint(10, 2048, (256,), generator=draw).tolist())
    limits = MicroBatchLimits(sequences=1, tokens=4096, pack=True, one_row=True, multiple_of=2)
    least = -(-(len(batch.tokens) - len(batch)) // 4096)
    assert len(plan(batch, limits)) <= 1.02 * least


@pytest.mark.parametrize(("attention", "compiles"), [("flex", False), ("varlen", True)])
def test_rows_for_compiled_kernels_have_four_widths_and_little_padding(attention, compiles):
    """Twenty steps of 64 sequences of random lengths, most of them short, and dummies."""
    config = TrainerConfig(micro_batch_tokens=16_384, compile=CompileConfig(enable=compiles))
    limits = MicroBatchLimits.of(config, attention)
    draw = torch.Generator().manual_seed(0)
    shapes = {lay_out(batch_of([2]), [], limits).tokens.shape}
    cells = used = 0
    for _ in range(20):
        lengths = (2 + 4095 * torch.rand(64, generator=draw).square()).int().tolist()
        for micro in micro_batches(batch_of(lengths), limits):
            shapes.add(micro.tokens.shape)
            cells += micro.tokens.numel()
            used += int((~micro.first).sum())
    assert sorted(shapes) == [(1, 4096), (1, 8192), (1, 12_288), (1, 16_384)]
    assert cells <= 1.04 * used


@pytest.mark.parametrize("attention", ["dense", "varlen"])
def test_other_rows_are_as_long_as_their_sequences(attention):
    limits = MicroBatchLimits.of(TrainerConfig(micro_batch_tokens=16_384), attention)
    (micro,) = micro_batches(batch_of([100, 38]), limits)
    assert micro.tokens.numel() == {"dense": 2 * 100, "varlen": 136}[attention]


@st.composite
def siblings(draw) -> tuple[Batch, list[tuple[int, ...]]]:
    """Return a batch of sequences of a few prompts, and the tokens of each. Each token of a prompt
    and each sampled token is a number of its own.
    """
    prompts = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    answers = st.tuples(st.integers(0, len(prompts) - 1), st.integers(0, 6))
    texts = []
    for number, (prompt, count) in enumerate(draw(st.lists(answers, min_size=1, max_size=12))):
        begin = 1000 * (number + 1)
        fed = range(10 * prompt, 10 * prompt + prompts[prompt])
        texts.append((*fed, *range(begin, begin + count)))
    tokens = torch.tensor([token for text in texts for token in text])
    weights = (tokens >= 1000).float()
    lengths = torch.tensor([len(text) for text in texts])
    return Batch(tokens=tokens, lengths=lengths, loss_weights=weights), texts


@settings(max_examples=30)  # a mask takes 70 ms
@given(siblings(), CUTTINGS, st.integers(2, 5))
def test_tokens_that_share_a_prompt_attend_to_their_own_sequence_alone(siblings, limits, sharing):
    batch, texts = siblings
    limits = replace(limits, pack=True, sharing=sharing)
    places = [(text, end) for text in texts for end in range(len(text))]
    seen = []
    for rows in plan(batch, limits):
        micro = lay_out(batch, rows, limits)
        count, width = micro.tokens.shape
        mask = create_mask(tree_mask(micro.positions), count, None, width, width, device="cpu")
        for place, cell in zip(micro.index.tolist(), micro.cells.tolist(), strict=True):
            text, end = places[place]
            seen.append(place)
            if end:
                row, column = divmod(cell, width)
                attended = micro.tokens[row][mask[row, 0, column]]
                assert micro.targets[row, column] == text[end]
                assert tuple(attended.tolist()) == text[:end]
                assert micro.positions[row, column] == end - 1
        trees = [tree for row in rows for tree in row]
        assert all(len(tree.sequences) <= sharing for tree in trees)
        if limits.tokens is None:
            assert sum(len(tree.sequences) for tree in trees) <= limits.sequences
        else:
            alone = len(trees) == len(trees[0].sequences) == 1
            assert alone or micro.tokens.numel() <= limits.tokens
    assert sorted(seen) == list(range(len(batch.tokens)))


def test_sequences_that_share_a_prompt_need_fewer_cells():
    texts = [(*range(10), 100 + number, 200 + number) for number in range(4)]
    batch = Batch(
        tokens=torch.tensor(texts).flatten(),
        lengths=torch.tensor([12] * 4),
        loss_weights=torch.tensor([0.0] * 10 + [1.0] * 2).repeat(4),
    )
    limits = MicroBatchLimits(sequences=4, tokens=None, pack=True, one_row=False, multiple_of=1)
    alone, shared = (
        lay_out(batch, plan(batch, each)[0], each) for each in (limits, replace(limits, sharing=4))
    )
    assert alone.tokens.shape == (4, 11)
    assert shared.tokens.shape == (1, 9 + 4 * 2)
    assert shared.loss_weights.equal(alone.loss_weights)


@given(siblings(), st.integers(1, 4), st.integers(2, 5))
def test_ranks_share_prompts_if_the_largest_part_then_has_fewer_cells(siblings, ranks, sharing):
    batch, _ = siblings
    shares = shares_of(batch, ranks, sharing)
    assert sorted(chain.from_iterable(shares)) == [*range(len(batch))]
    assert max(map(len, shares)) == -(-len(batch) // ranks)
    assert largest(batch, shares, sharing) <= largest(batch, batch.shares(ranks), sharing)


@pytest.mark.parametrize(("ranks", "cells"), [(2, 2 * (9 + 4 * 2)), (4, 9 + 4 * 2), (8, 9 + 2 * 2)])
def test_sequences_of_a_prompt_go_to_one_rank(ranks, cells):
    texts = torch.arange(4).repeat_interleave(4).view(-1, 1) * 100 + torch.arange(12)
    texts[:, 10:] = torch.arange(1000, 1032).view(-1, 2)
    batch = Batch(
        tokens=texts.flatten(),
        lengths=torch.tensor([12] * 16),
        loss_weights=torch.tensor([0.0] * 10 + [1.0] * 2).repeat(16),
    )
    assert largest(batch, shares_of(batch, ranks, 4), 4) == cells
    assert largest(batch, shares_of(batch, ranks, 1), 4) > cells


def largest(batch: Batch, shares: list[list[int]], sharing: int) -> int:
    """Return the largest number of cells that a rank computes."""
    limits = MicroBatchLimits(
        sequences=99, tokens=None, pack=True, one_row=True, multiple_of=1, sharing=sharing
    )
    micros = [plan(batch.select(share), limits) for share in shares]
    trees = [chain.from_iterable(chain.from_iterable(rows)) for rows in micros]
    return max(sum(tree.cells for tree in part) for part in trees)


@pytest.mark.parametrize("sharing", [1, 3])
def test_the_head_computes_the_cells_before_tokens_of_weight_above_0(sharing):
    texts = [(*range(10), 100 + number, 200 + number) for number in range(3)]
    batch = Batch(
        tokens=torch.tensor(texts).flatten(),
        lengths=torch.tensor([12] * 3),
        loss_weights=torch.tensor([0.0] * 10 + [1.0] * 2).repeat(3),
    )
    limits = MicroBatchLimits(
        sequences=3, tokens=None, pack=True, one_row=True, multiple_of=8, sharing=sharing
    )
    micro = lay_out(batch, plan(batch, limits)[0], limits, weighted=True)
    assert micro.heads is not None
    weighted = micro.cells[micro.loss_index]
    # each sequence predicts its first answer from its own last token of the prompt
    assert micro.heads.tolist() == sorted(weighted.tolist())
    assert micro.tokens.flatten()[micro.heads].tolist() == [9, 100, 9, 101, 9, 102]
    assert lay_out(batch, plan(batch, limits)[0], limits).heads is None


def test_a_shared_prompt_keeps_to_the_limit_with_padding():
    texts = [(*range(4), *range(begin, begin + 8)) for begin in (100, 200)]
    batch = Batch(
        tokens=torch.tensor(texts).flatten(),
        lengths=torch.tensor([12] * 2),
        loss_weights=torch.tensor([0.0] * 4 + [1.0] * 8).repeat(2),
    )
    limits = MicroBatchLimits(
        sequences=1, tokens=20, pack=True, one_row=True, multiple_of=8, sharing=2
    )
    micros = [lay_out(batch, rows, limits) for rows in plan(batch, limits)]
    assert [micro.tokens.numel() for micro in micros] == [16, 16]  # 19 cells would be padded to 24


def test_without_rows_a_dummy_holds_nothing():
    limits = MicroBatchLimits(sequences=2, tokens=None, pack=True, one_row=False, multiple_of=8)
    dummy = lay_out(batch_of([3, 4]), [], limits)
    assert dummy.tokens.shape == (1, 8)
    values = (dummy.per_token(torch.ones(1, 8)), dummy.loss_weights, dummy.columns["place"])
    assert [value.shape for value in values] == [(0,)] * 3
