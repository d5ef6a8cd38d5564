"""Conversion of rollouts to the batch that the trainer takes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torchtitan.config import Configurable

from rl.algorithms.losses import Reduction
from rl.algorithms.tokens import token_weights
from rl.errors import RunError, shown
from rl.metrics import Metrics
from rl.types import Batch, Rollout
from rl.types.routed_experts import RoutedExperts
from rl.types.sampling_mask import SamplingMask


def make_batch(
    rollouts: Sequence[Rollout],
    advantages: torch.Tensor | Sequence[float] | None = None,
    *,
    reduction: Reduction | None = None,
    max_tokens: int = 0,
) -> Batch:
    """Return the sequences of ``rollouts`` as a batch. Only sampled tokens have a loss weight.

    Columns: ``behaviour_logprobs``, ``versions`` (policy version of each sampled token, else -1)
    and, if given, ``advantages``, as float32 [N] for N rollouts or [C] for their C sampled tokens.
    The loss weights are 1, or those of ``reduction``: see :func:`reduced`. The batch has a sampling
    mask if a sequence has one, and experts if a sequence has a record of these.

    Raises RunError for advantages of another length, and for advantages that are not finite.
    """
    sequences = [sequence for rollout in rollouts for sequence in rollout.sequences]
    sizes = torch.tensor([len(rollout.sequences) for rollout in rollouts])
    is_forked = len(sequences) > len(rollouts)
    counts = counts_of(rollouts)
    sampled = _joined([sequence.sampled for sequence in sequences])
    mask = experts = None
    if any(seq.sampling_mask is not None for seq in sequences):
        masks = [seq.sampling_mask or SamplingMask.whole(len(seq)) for seq in sequences]
        mask = SamplingMask.joined(masks)
    if known := [seq.experts for seq in sequences if seq.experts is not None]:
        records = [seq.experts or RoutedExperts.none(len(seq), known[0]) for seq in sequences]
        experts = RoutedExperts.joined(records)
    batch = Batch(
        tokens=_joined([seq.tokens for seq in sequences]).long(),
        lengths=torch.tensor([len(seq) for seq in sequences]),
        loss_weights=sampled.float(),
        columns={
            "behaviour_logprobs": _joined([seq.logprobs for seq in sequences]),
            "versions": _joined([seq.versions for seq in sequences]).float(),
        },
        rollouts=torch.arange(len(rollouts)).repeat_interleave(sizes) if is_forked else None,
        sampling_mask=mask,
        experts=experts,
    )
    if advantages is not None:
        values = _checked(advantages, len(rollouts), int(counts.sum()))
        is_per_rollout = len(values) == len(rollouts)
        values = values.repeat_interleave(counts) if is_per_rollout else values
        batch.columns["advantages"] = batch.scatter(values)
    return batch if reduction is None else reduced(batch, reduction, max_tokens)


def _checked(advantages: Any, rollouts: int, sampled: int) -> torch.Tensor:
    """Return ``advantages`` as float32 [rollouts] or [sampled]; raise RunError if they are none."""
    try:
        if isinstance(advantages, np.ndarray):  # which may be reversed, or hold objects
            advantages = np.ascontiguousarray(advantages, dtype=np.float32)
        values = torch.as_tensor(advantages, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise RunError(f"advantages are {shown(advantages)}; they must be numbers") from None
    if values.shape not in ((rollouts,), (sampled,)):
        raise RunError(
            f"advantages have the shape {list(values.shape)}; they must have one number for each "
            f"rollout, [{rollouts}], or for each sampled token, [{sampled}]"
        )
    if wrong := (~values.isfinite()).nonzero().flatten().tolist():
        raise RunError(
            f"advantages.{wrong[0]} is {values[wrong[0]].item()}; advantages must be finite"
        )
    return values


def reduced(batch: Batch, reduction: Reduction, max_tokens: int = 0) -> Batch:
    """Return ``batch`` with loss weights times those of :func:`rl.algorithms.tokens.token_weights`.

    A rollout of several sequences is weighted as one completion. With ``fixed_length``,
    ``optim_step`` divides by the number of rollouts, whatever their length: Dr. GRPO,
    arXiv:2503.20783, eq. 2, times 1 / max_tokens as in its code.
    """
    rollouts = torch.arange(len(batch)) if batch.rollouts is None else batch.rollouts
    owner = rollouts.repeat_interleave(batch.lengths)
    sizes = rollouts.bincount()
    counts = owner[batch.loss_mask].bincount(minlength=len(sizes))
    weights = batch.loss_weights * token_weights(counts, reduction, max_tokens)[owner]
    denominators = 1.0 / sizes.double()[rollouts] if reduction == "fixed_length" else None
    return replace(batch, loss_weights=weights, reduction=reduction, denominators=denominators)


def without(batch: Batch, masked: Sequence[bool]) -> Batch:
    """Return ``batch`` with weights of 0 for all tokens of each rollout that is ``masked``, so that
    the loss is that of the others alone.
    """
    rollouts = torch.arange(len(batch)) if batch.rollouts is None else batch.rollouts
    is_kept = ~torch.tensor(masked)[rollouts]
    divisors = batch.denominators
    return replace(
        batch,
        loss_weights=batch.loss_weights * is_kept[batch.owners],
        denominators=None if divisors is None else divisors * is_kept,
    )


def reduced_for(batch: Batch, loss: Configurable.Config) -> Batch:
    """Return ``batch`` with the reduction of ``loss``, if ``loss`` has one.

    Raises RunError if ``batch`` has another reduction, or needs a maximum length.
    """
    wanted = getattr(loss, "reduction", None)
    if wanted is None or wanted == batch.reduction:
        return batch
    if batch.reduction is not None:
        raise RunError(
            f"loss.reduction is {wanted!r}, and the batch was made with reduction="
            f"{batch.reduction!r}; make the batch without reduction, or with that of the loss"
        )
    if wanted == "fixed_length":
        raise RunError(
            "loss.reduction is 'fixed_length', which divides by the maximum length of a "
            "completion; make the batch with reduction='fixed_length' and max_tokens"
        )
    return reduced(batch, wanted)


def counts_of(rollouts: Sequence[Rollout]) -> torch.Tensor:
    """Return the number of sampled tokens of each rollout, int64 [N]."""
    return torch.tensor([rollout.sampled_count for rollout in rollouts])


def by_player(rollouts: Sequence[Rollout]) -> list[tuple[int, int, Rollout]]:
    """Return each sequence of ``rollouts`` as a rollout of its own, whose reward is that of its
    turns, with the number of its rollout and of its player. Without players, sequences are
    numbered in the order of their first answers.
    """
    parts = list[tuple[int, int, Rollout]]()
    for number, rollout in enumerate(rollouts):
        lengths = rollout.turns
        rewards = rollout.turn_rewards or (0.0,) * len(lengths)
        first = 0
        players = rollout.players or range(len(rollout.sequences))
        for player, sequence in zip(players, rollout.sequences, strict=True):
            left = int(np.count_nonzero(sequence.sampled))
            last = first
            while left > 0:
                left -= lengths[last]
                last += 1
            part = replace(
                rollout,
                sequences=(sequence,),
                reward=float(sum(rewards[first:last])),
                turn_rewards=rewards[first:last],
                turn_lengths=tuple(lengths[first:last]),
                turn_order=(),
                players=rollout.players and (player,),
            )
            parts.append((number, player, part))
            first = last
    return parts


def split_by_player(
    rollouts: Sequence[Rollout], rewards: torch.Tensor
) -> tuple[list[Rollout], torch.Tensor, torch.Tensor]:
    """Return the M parts of :func:`by_player`, their rewards, float32 [M], and groups of the same
    player of a prompt, int64 [M].

    ``rewards`` [N] are those of ``rollouts``. What they have beyond the rewards of answers, such as
    the score of a reward model, is added to each player's.
    """
    owners, players, parts = zip(*by_player(rollouts), strict=True)
    more = rewards - torch.tensor([rollout.reward for rollout in rollouts])
    by_part = torch.tensor([part.reward for part in parts]) + more[[*owners]]
    pairs = torch.tensor([[part.prompt.prompt_id for part in parts], players])
    return [*parts], by_part, pairs.unique(dim=1, return_inverse=True)[1]


def task_metrics(rollouts: Sequence[Rollout], names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the metrics ``names`` of each rollout, float64 [N] each.

    Raises RunError if a rollout has no metric of that name.
    """
    for rollout in rollouts:
        if missing := sorted({*names} - rollout.metrics.keys()):
            raise RunError(
                f"algorithm.advantage reads the metric {missing[0]!r} of the task's scores; they "
                f"have {', '.join(rollout.metrics)}"
            )
    numbers = {name: [Metrics(rollout.metrics)[name] for rollout in rollouts] for name in names}
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in numbers.items()}


def turn_ends(rollouts: Sequence[Rollout]) -> torch.Tensor:
    """Return whether each of the C sampled tokens is the last one of its turn, bool [C]."""
    lengths = [length for rollout in rollouts for length in rollout.turns]
    ends = torch.zeros(sum(lengths), dtype=torch.bool)
    ends[torch.tensor(lengths, dtype=torch.int64).cumsum(0) - 1] = True
    return ends


def time_order(rollouts: Sequence[Rollout]) -> torch.Tensor:
    """Return the indices, int64 [C], that bring the C sampled tokens of each rollout into the order
    in which they were sampled.

    Turns of two sequences, such as those of an agent and its sub-agent, may alternate in time.
    """
    lengths = [length for rollout in rollouts for length in rollout.turns]
    turns = iter(torch.arange(sum(lengths)).split(lengths))
    ordered = list[torch.Tensor]()
    for rollout in rollouts:
        parts = [next(turns) for _ in rollout.turns]
        order = rollout.turn_order or range(len(parts))
        ordered += [parts[place] for place in sorted(range(len(parts)), key=order.__getitem__)]
    return torch.cat(ordered)


def turn_rewards(rollouts: Sequence[Rollout]) -> torch.Tensor:
    """Return the turn reward of each of the C sampled tokens, float32 [C].

    The last token of a turn has the reward of the turn; all other tokens have 0. All tokens of a
    rollout without ``turn_rewards`` have 0. Raises RunError if a rollout's number of turn rewards
    differs from its number of turns.
    """
    earned = torch.zeros(int(counts_of(rollouts).sum()))
    per_turn = list[float]()
    for rollout in rollouts:
        turns = len(rollout.turns)
        rewards = rollout.turn_rewards or (0.0,) * turns
        if len(rewards) != turns:
            raise RunError(
                f"rollout {rollout.sample} of prompt {rollout.prompt.prompt_id} has "
                f"{len(rewards)} rewards of turns, but {turns} turns"
            )
        per_turn += rewards
    earned[turn_ends(rollouts)] = torch.tensor(per_turn, dtype=torch.float32)
    return earned


def whole_texts(rollouts: Sequence[Rollout]) -> tuple[Batch, torch.Tensor]:
    """Return a batch of each rollout's last sequence, and the indices [N] of the outputs that are
    the scores of the rollouts, for a reward model.

    Each sequence gets one more token, a placeholder. The value at the placeholder is computed from
    all tokens before it.
    """
    rows = [np.append(rollout.sequences[-1].tokens, 0) for rollout in rollouts]
    lengths = torch.tensor([len(row) for row in rows])
    tokens = _joined(rows).long()
    batch = Batch(tokens=tokens, lengths=lengths, loss_weights=torch.zeros(len(tokens)))
    return batch, lengths.cumsum(0) - 1


def _joined(arrays: Sequence[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays))
