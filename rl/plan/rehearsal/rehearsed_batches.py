"""Batches of at most two micro-batches on a rank, of the longest sequences or of varied ones, and
their losses; and the shapes of the micro-batches of sequences of any length.
"""

import random
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rl.algorithms.batch import make_batch, whole_texts
from rl.algorithms.sequence_losses import Labels
from rl.algorithms.sequence_scores import (
    LinearLoss,
    LossOfPairs,
    coefficients,
    pair_batch,
    score_batch,
    sequence_scores,
    with_coefficients,
    with_mismatched,
)
from rl.config import PreferenceConfig, RLConfig, SFTConfig
from rl.data.batches import batch_of, batch_of_pairs
from rl.data.examples import Example
from rl.data.preferences import Pair
from rl.metrics import Entry
from rl.model.shape import shape_of
from rl.plan.planned_run import PlannedRun
from rl.training.micro_batches import lay_out
from rl.training.packing import MicroBatchLimits, plan
from rl.training.trainer_config import TrainerConfig
from rl.types import Batch, Completion, Prompt, Rollout, Sequence
from rl.types.routed_experts import RoutedExperts, dtype_of

MICRO_BATCHES = 2

SHAPE_STEPS = 8
"""Number of steps of which the shapes of micro-batches are counted."""


@dataclass(frozen=True)
class Work:
    """Computation of a role in a step."""

    batch: Batch
    loss: Any = None
    """Loss of ``forward_backward``; None if the role only runs forward."""
    forward: bool = False
    """Whether the role runs forward in a step before it trains."""
    denominator: float | None = None
    temperature: float = 1.0


def lengths_of(
    run: PlannedRun, trainer: TrainerConfig, longest: int, seed: int | None = None
) -> list[int]:
    """Return the lengths of the sequences of a rank's step: the longest ones that fill two
    micro-batches, or all of the step if it has fewer, and shorter ones in the rest. With a
    ``seed``, lengths are drawn, and fill half of it or more.
    """
    share = -(-run.config.sequences // trainer.dp_degree)
    cells = longest - 1  # the last token predicts nothing
    limit = trainer.micro_batch_tokens
    per_micro = trainer.micro_batch_size if limit is None else max(1, limit // cells)
    lengths = [longest] * min(share, MICRO_BATCHES * per_micro)
    left = limit - per_micro * cells if limit is not None and trainer.packing else 0
    if left > 1 and share >= len(lengths) + MICRO_BATCHES:
        lengths += [min(left + 1, longest)] * MICRO_BATCHES
    if seed is None:
        return lengths
    draw = random.Random(seed)
    room = draw.uniform(0.5, 1) * sum(lengths)
    lengths = []
    while sum(lengths) < room and len(lengths) < share:
        lengths.append(draw.randint(longest // 8 + 2, longest))
    return lengths


def shapes_of(run: PlannedRun, trainer: TrainerConfig, limits: MicroBatchLimits) -> list[list[int]]:
    """Return rows and width of each shape of a rank's micro-batches and of a dummy, in steps of
    sequences of random lengths up to the longest, most of them short. Kernels are compiled for
    these shapes; the result is empty if none are compiled.
    """
    if not limits.compiled:
        return []
    draw = torch.Generator().manual_seed(0)
    shapes = set()
    for _ in range(SHAPE_STEPS):
        parts = torch.rand(-(-run.config.sequences // trainer.dp_degree), generator=draw).square()
        lengths = (2 + parts * (run.config.longest - 1)).int().tolist()
        batch = batch_of(_examples(lengths, run.shape.vocab_size))
        for rows in [*plan(batch, limits), []]:
            shapes.add(lay_out(batch, rows, limits).tokens.shape)
    return [[*shape] for shape in sorted(shapes)]


def work_of(run: PlannedRun, name: str, *, seed: int | None = None) -> Work:
    """Return what the role ``name`` computes in a step on a rank: the longest sequences, or with a
    ``seed`` varied ones.
    """
    config = run.config
    lengths = lengths_of(run, run.roles[name].trainer, run.config.longest, seed)
    if isinstance(config, RLConfig):
        return _rl_work(run, config, name, lengths)
    if isinstance(config, PreferenceConfig):
        return _preference_work(config, name, lengths)
    assert isinstance(config, SFTConfig)
    longest = config.task.max_tokens
    examples = _examples(lengths, config.model.vocab_size)
    batch = batch_of(examples, reduction=config.loss.reduction, max_tokens=longest)
    return Work(batch, config.loss.build())


def _rl_work(run: PlannedRun, config: RLConfig, name: str, lengths: Rows[int]) -> Work:
    rollouts = _rollouts(config, lengths)
    if name in config.roles and config.roles[name].reward_weight:
        return Work(whole_texts(rollouts)[0], forward=True)
    algorithm = config.algorithm.build(run=config)
    limit = config.rollout.max_tokens
    batch = make_batch(rollouts, reduction=algorithm.reduction, max_tokens=limit)
    read = config.algorithm.columns()
    columns = [column for _, column in read.values()]
    columns += [role.column for role in config.roles.values() if role.column]
    for column in columns:
        batch.columns[column] = torch.full((len(batch.tokens),), -1.0)
    batch.columns["staleness"] = torch.zeros(len(batch.tokens))
    algorithm.score(batch, rollouts, torch.tensor([rollout.reward for rollout in rollouts]))
    learns = name in ("trainer", "critic")
    return Work(
        batch,
        algorithm.loss(name).build() if learns else None,
        forward=name in read or not learns,
        denominator=algorithm.denominator(len(rollouts)),
        temperature=algorithm.temperature,
    )


def _rollouts(config: RLConfig, lengths: Rows[int]) -> list[Rollout]:
    """Return rollouts whose completions are as long as the config allows."""
    rollouts = []
    advantage = getattr(config.algorithm, "advantage", None)
    metrics: dict[str, Entry] = dict.fromkeys(advantage.metrics if advantage else (), 0.0)
    shape = shape_of(config.model)
    for number, length in enumerate(lengths):
        group, sample = divmod(number, config.rollout.samples_per_prompt)
        sampled = min(length - 1, config.rollout.max_tokens)
        tokens = [number % config.model.vocab_size, *[0] * (length - sampled - 1)]
        prompt = Prompt(prompt_id=group, tokens=tokens, text="", answer="")  # shared with none
        records = None
        if config.trainer.router_replay != "none":
            chosen = np.arange(shape.experts_per_token, dtype=dtype_of(shape.num_experts))
            records = RoutedExperts(np.tile(chosen, (length, shape.n_layers, 1)))
        completion = Completion(
            tokens=[0] * sampled,
            logprobs=[-1.0] * sampled,
            versions=[0] * sampled,
            finish_reason="length",
            experts=records,
        )
        rollouts.append(
            Rollout(
                prompt=prompt,
                sample=sample,
                sequences=(Sequence.of(prompt.tokens, completion),),
                text="",
                stop_reason="length",
                reward=float(number % 2),
                metrics=metrics,
            )
        )
    return rollouts


def _preference_work(config: PreferenceConfig, name: str, lengths: Rows[int]) -> Work:
    loss = config.loss.build()
    lengths = [*lengths, lengths[-1]] if len(lengths) % 2 else lengths
    examples = _examples(lengths, config.model.vocab_size)
    if loss.is_unpaired:
        half = examples[: max(2, len(examples) // 2)]
        batch = with_mismatched(batch_of(half), max_tokens=config.task.max_tokens)
        labels = Labels.unpaired(torch.arange(len(half)) % 2 == 0)
        batch = score_batch(batch, loss)
    else:
        pairs = [
            Pair(chosen=chosen, rejected=rejected, prompt_tokens=1)
            for chosen, rejected in zip(examples[::2], examples[1::2], strict=True)
        ]
        batch = score_batch(batch_of_pairs(pairs), loss)
        labels = Labels.pairs(len(pairs))
    if name != "trainer":
        return Work(batch, forward=True)
    scores = sequence_scores(batch, torch.full((len(batch.tokens),), -1.0))
    prior = scores if loss.needs_reference else None
    if config.in_one_pass:
        pairs = LossOfPairs.Config(loss=config.loss).build()
        return Work(pair_batch(batch, labels, prior), pairs, denominator=loss.count(labels))
    weights, _, _ = coefficients(loss, scores, prior, labels)
    if loss.is_unpaired:
        weights = weights[: len(batch) // 2]
    learned = with_coefficients(batch, weights)
    linear = LinearLoss.Config(head=loss.head).build()
    return Work(learned, linear, forward=True, denominator=loss.count(labels))


def _examples(lengths: Rows[int], words: int) -> list[Example]:
    return [
        Example(
            tokens=np.arange(length, dtype=np.int32) % words, trained=np.arange(length) > 0, line=1
        )
        for length in lengths
    ]
