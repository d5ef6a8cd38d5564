"""From rollouts to the batch that the trainer takes."""

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Literal

import torch

from rl.algorithms.losses import token_weights
from rl.types import Batch, Rollout


def make_batch(rollouts: Sequence[Rollout], *, reduction: str, max_tokens: int) -> Batch:
    """One sequence per rollout, prompt then completion; only completion tokens have weight.

    Columns: ``behaviour_logprobs`` and ``versions`` (the policy version of each token, -1 on
    prompts).
    """
    prompts = torch.tensor([len(r.prompt.tokens) for r in rollouts])
    lengths = torch.tensor([len(r.completion.tokens) for r in rollouts])
    owner = torch.arange(len(rollouts)).repeat_interleave(prompts + lengths)
    place = torch.arange(len(owner)) - ((prompts + lengths).cumsum(0) - prompts - lengths)[owner]
    completed = place >= prompts[owner]

    def column(per_token: Sequence[Sequence[float]], on_prompt: float) -> torch.Tensor:
        values = torch.full((len(owner),), on_prompt)
        values[completed] = _end_to_end("f", per_token)
        return values

    return Batch(
        tokens=_end_to_end("q", [r.prompt.tokens + r.completion.tokens for r in rollouts]),
        lengths=prompts + lengths,
        loss_weights=torch.where(
            completed, token_weights(lengths, reduction, max_tokens)[owner], 0.0
        ),
        columns={
            "behaviour_logprobs": column([r.completion.logprobs for r in rollouts], 0.0),
            "versions": column([r.completion.versions for r in rollouts], -1.0),
        },
    )


def whole_texts(rollouts: Sequence[Rollout]) -> tuple[Batch, torch.Tensor]:
    """The same sequences, for what a model says of each as a whole: its output at the places that
    come with them.

    Each has one token more, which nobody reads: what is said of it is said after all that come
    before.
    """
    rows = [[*rollout.prompt.tokens, *rollout.completion.tokens, 0] for rollout in rollouts]
    lengths = torch.tensor([len(row) for row in rows])
    tokens = _end_to_end("q", rows)
    return Batch(
        tokens=tokens, lengths=lengths, loss_weights=torch.zeros(len(tokens))
    ), lengths.cumsum(0) - 1


def _end_to_end(code: Literal["f", "q"], rows: Sequence[Sequence[float]]) -> torch.Tensor:
    """Float32 or int64; for a batch of a hundred thousand tokens torch.tensor would take eight
    times as long.
    """
    return torch.frombuffer(
        array(code, chain.from_iterable(rows)), dtype={"f": torch.float32, "q": torch.int64}[code]
    )


def rollout_metrics(groups: list[list[Rollout]]) -> dict[str, float]:
    """What a step's rollouts came to: rewards, lengths, and how many groups teach nothing.

    Rewards are of all, as ``reward/NAME``, and of each task of a mixture, as ``reward/TASK/NAME``.
    """
    rollouts = [rollout for group in groups for rollout in group]
    lengths = [len(r.completion.tokens) for r in rollouts]
    metrics = {
        **_reward_metrics("reward", groups),
        "completion/length_mean": sum(lengths) / len(rollouts),
        "completion/length_max": float(max(lengths)),
        "completion/cut_off": sum(r.completion.finish_reason == "length" for r in rollouts)
        / len(rollouts),
    }
    for task in sorted({r.prompt.task for r in rollouts} - {""}):
        metrics |= _reward_metrics(
            f"reward/{task}", [group for group in groups if group[0].prompt.task == task]
        )
    return metrics


def _reward_metrics(prefix: str, groups: list[list[Rollout]]) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group]
    flat = sum(len({r.reward for r in group}) == 1 for group in groups)
    metrics = {
        f"{prefix}/mean": sum(r.reward for r in rollouts) / len(rollouts),
        f"{prefix}/zero_std_groups": flat / len(groups),
    }
    for name in sorted({name for r in rollouts for name in r.metrics}):
        values = [r.metrics[name] for r in rollouts if name in r.metrics]
        metrics[f"{prefix}/{name}"] = sum(values) / len(values)
    return metrics
