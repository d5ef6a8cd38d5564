"""Batches of the tests: ragged, with shared prompts, with sampling masks."""

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from rl.types import Batch
from rl.types.routed_experts import RoutedExperts
from rl.types.sampling_mask import SamplingMask, encode

VOCAB_SIZE = 30


def ragged_batch(lengths: tuple[int, ...] = (4, 15, 1, 7, 11), seed: int = 0) -> Batch:
    """Sequences up to the model's longest and down to one token, with a weight and columns of its
    own per token.

    Prompts have weight 0, and so has every fifth token: a tool's answer within a completion. The
    ratios of these are by far the largest, so that any sum or extreme that counts them is wrong.
    """
    draw = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    place = torch.cat([torch.arange(length) for length in lengths])
    prompt = torch.cat([torch.full((length,), max(1, length // 3)) for length in lengths])
    weights = torch.rand(total, generator=draw) + 0.5
    silent = (place < prompt) | (place % 5 == 4)
    return Batch(
        tokens=torch.randint(VOCAB_SIZE, (total,), generator=draw),
        lengths=torch.tensor(lengths),
        loss_weights=weights.masked_fill(silent, 0.0),
        columns={
            "advantages": torch.randn(total, generator=draw),
            "behaviour_logprobs": (torch.randn(total, generator=draw) * 0.3 - 3.4).masked_fill(
                silent, -12.0
            ),
            "reference_logprobs": (torch.randn(total, generator=draw) * 0.3 - 3.4).masked_fill(
                silent, 12.0
            ),
        },
    )


def with_prompts(batch: Batch, prompts: Sequence[int]) -> Batch:
    """The batch with the same first five tokens, of weight 0, in sequences of the same prompt."""
    draw = torch.Generator().manual_seed(0)
    words = torch.randint(VOCAB_SIZE, (max(prompts) + 1, 5), generator=draw)
    ends = batch.lengths.cumsum(0).tolist()
    tokens = batch.tokens.clone()
    weights = batch.loss_weights.clone()
    for prompt, length, end in zip(prompts, batch.lengths.tolist(), ends, strict=True):
        begin = end - length
        size = min(length, 5)
        tokens[begin : begin + size] = words[prompt, :size]
        weights[begin : begin + size] = 0.0
    return replace(batch, tokens=tokens, loss_weights=weights)


def with_mask(batch: Batch) -> Batch:
    """The batch with a sampling mask. By turns a token was sampled from all ids, from a half of
    them, and from two at most; first tokens were not sampled.
    """
    draw = torch.Generator().manual_seed(0)
    kept = torch.rand(len(batch.tokens), VOCAB_SIZE, generator=draw) < 0.5
    kept[::3] = True
    kept[1::3] = torch.arange(VOCAB_SIZE) == 5
    kept[batch.lengths.cumsum(0) - batch.lengths] = True
    kept[torch.arange(len(kept)), batch.tokens] = True
    return replace(batch, sampling_mask=SamplingMask.of_rows(encode(kept)))


def with_experts(batch: Batch, count: int = 4) -> Batch:
    """The batch with two of ``count`` experts in each of two layers for three of four tokens.
    Sequences have the same experts as long as they have the same tokens.
    """
    ids = np.full((len(batch.tokens), 2, 2), 255, dtype=np.uint8)
    begin = 0
    for tokens in batch.tokens.split(batch.lengths.tolist()):
        for place in range(len(tokens) - 1):
            draw = random.Random(repr(tokens[: place + 1].tolist()))
            if draw.random() < 0.75:
                ids[begin + place] = [draw.sample(range(count), 2) for _ in range(2)]
        begin += len(tokens)
    return replace(batch, experts=RoutedExperts(ids))


def with_targets(batch: Batch, *shape: int) -> Batch:
    """The batch with other targets than its tokens, int64 [T, *shape], and signed weights."""
    draw = torch.Generator().manual_seed(0)
    shape = (len(batch.tokens), *shape)
    columns = batch.columns | {"weights": torch.randn(shape, generator=draw)}
    targets = torch.randint(-1, VOCAB_SIZE, shape, generator=draw)
    if len(shape) > 1:
        targets[::4] = targets[::4, :1]
    return replace(batch, targets=targets, columns=columns)


def without_advantages() -> Batch:
    """A batch from which the policy term learns nothing."""
    batch = ragged_batch()
    return replace(batch, columns=batch.columns | {"advantages": torch.zeros(len(batch.tokens))})


def broken(batch: Batch, row: int) -> Batch:
    """The batch with an infinite advantage in one row."""
    advantages = batch.columns["advantages"].clone()
    end = int(batch.lengths[: row + 1].sum())
    advantages[end - int(batch.lengths[row]) : end] = torch.inf
    return replace(batch, columns=batch.columns | {"advantages": advantages})
