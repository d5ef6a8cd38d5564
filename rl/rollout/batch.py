"""From groups of rollouts to the batch that the trainer takes."""

import torch

from rl.algorithms.advantages import group_advantages
from rl.algorithms.losses import token_weights
from rl.types import Batch, Rollout


def make_batch(groups: list[list[Rollout]], *, normalize_std: bool, reduction: str) -> Batch:
    """One sequence per rollout, prompt then completion; only completion tokens have weight.

    Columns: ``advantages``, ``behaviour_logprobs`` and ``versions`` (the policy version of each
    token, -1 on prompts). All groups have the same number of rollouts.
    """
    rewards = torch.tensor([[rollout.reward for rollout in group] for group in groups], dtype=torch.float32)
    advantages = group_advantages(rewards, normalize_std=normalize_std).flatten()
    rollouts = [rollout for group in groups for rollout in group]
    weights = token_weights(torch.tensor([len(r.completion.tokens) for r in rollouts]), reduction)

    def column(values: list[list[float]], on_prompt: float) -> torch.Tensor:
        rows = zip(rollouts, values, strict=True)
        return torch.tensor([v for r, own in rows for v in [on_prompt] * len(r.prompt.tokens) + own])

    def spread(per_rollout: torch.Tensor) -> list[list[float]]:
        pairs = zip(rollouts, per_rollout.tolist(), strict=True)
        return [[value] * len(r.completion.tokens) for r, value in pairs]

    return Batch(
        tokens=torch.tensor([t for r in rollouts for t in r.prompt.tokens + r.completion.tokens]),
        lengths=torch.tensor([len(r.prompt.tokens) + len(r.completion.tokens) for r in rollouts]),
        weights=column(spread(weights), 0.0),
        columns={
            "advantages": column(spread(advantages), 0.0),
            "behaviour_logprobs": column([r.completion.logprobs for r in rollouts], 0.0),
            "versions": column([[float(v) for v in r.completion.versions] for r in rollouts], -1.0),
        },
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
        "completion/cut_off": sum(r.completion.finish_reason == "length" for r in rollouts) / len(rollouts),
    }
    for task in sorted({r.prompt.task for r in rollouts} - {""}):
        metrics |= _reward_metrics(f"reward/{task}", [group for group in groups if group[0].prompt.task == task])
    return metrics


def _reward_metrics(prefix: str, groups: list[list[Rollout]]) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group]
    flat = sum(len({r.reward for r in group}) == 1 for group in groups)
    metrics = {
        f"{prefix}/mean": sum(r.reward for r in rollouts) / len(rollouts),
        f"{prefix}/flat_groups": flat / len(groups),
    }
    for name in sorted({name for r in rollouts for name in r.metrics}):
        values = [r.metrics[name] for r in rollouts if name in r.metrics]
        metrics[f"{prefix}/{name}"] = sum(values) / len(values)
    return metrics
