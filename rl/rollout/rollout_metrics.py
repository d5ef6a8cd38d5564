"""Metrics of a step's rollouts."""

from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter

from rl.metrics import Metrics
from rl.types import Rollout

RewardKey = Callable[[Rollout], Hashable]
"""Function that returns what the reward of a rollout in training depends on."""


def all_equal(group: Sequence[Rollout], reward_key: RewardKey) -> bool:
    """Whether training sees equal rewards of all rollouts of ``group``, so that it learns
    nothing.
    """
    return len({reward_key(rollout) for rollout in group}) == 1


def rollout_metrics(
    groups: list[list[Rollout]], reward_key: RewardKey = attrgetter("reward")
) -> dict[str, float]:
    """Return the metrics of a step's rollouts: rewards, lengths, and the share of groups of equal
    rewards, which teach nothing. ``reward_key`` is that of the algorithm.

    Rewards are ``reward/NAME`` for all rollouts and ``reward/TASK/NAME`` for each task of a
    mixture.
    """
    rollouts = [rollout for group in groups for rollout in group]
    lengths = sorted(rollout.sampled_count for rollout in rollouts)
    cut = [bool(rollout.cut_turns) or rollout.stop_reason == "length" for rollout in rollouts]

    def percentile(share: int) -> float:
        return float(lengths[-(-len(lengths) * share // 100) - 1])

    metrics = {
        **_reward_metrics("reward", groups, reward_key),
        "completion/length_mean": sum(lengths) / len(rollouts),
        "completion/length_p50": percentile(50),
        "completion/length_p90": percentile(90),
        "completion/length_p99": percentile(99),
        "completion/length_max": float(max(lengths)),
        "completion/cut_off": sum(cut) / len(rollouts),
    }
    for task in sorted({r.prompt.task for r in rollouts} - {""}):
        groups_of_task = [group for group in groups if group[0].prompt.task == task]
        metrics |= _reward_metrics(f"reward/{task}", groups_of_task, reward_key)
    return metrics


def _reward_metrics(
    prefix: str, groups: list[list[Rollout]], reward_key: RewardKey
) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group]
    flat = sum(len(group) > 1 and all_equal(group, reward_key) for group in groups)
    metrics = {
        f"{prefix}/mean": sum(r.reward for r in rollouts) / len(rollouts),
        f"{prefix}/zero_std_groups": flat / len(groups),
    }
    merged = Metrics.merged(Metrics(rollout.metrics) for rollout in rollouts)
    return metrics | {f"{prefix}/{name}": merged[name] for name in sorted(merged)}
