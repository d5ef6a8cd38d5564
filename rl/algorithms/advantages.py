"""How much better each token was than expected."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, ClassVar, Literal

import torch
from torchtitan.config import Configurable

from rl.algorithms.tokens import check_per_token, sum_by_sequence
from rl.errors import RunError, naming, shown
from rl.rules import SHARE


@dataclass(frozen=True, kw_only=True)
class Scored:
    """N completions and what they earned; their C tokens stand end to end."""

    rewards: torch.Tensor
    """Of each completion as a whole, float32 [N]."""

    groups: torch.Tensor
    """Which prompt each completion answers, int64 [N]: any numbers, equal ones for the same
    prompt."""

    lengths: torch.Tensor
    """Tokens of each completion, int64 [N]."""

    token_rewards: torch.Tensor
    """Of each token, float32 [C]: 0, or minus a KL penalty that belongs to the reward."""

    values: torch.Tensor | None = None
    """What a critic expected before each token, float32 [C]."""

    @cached_property
    def sequence(self) -> torch.Tensor:
        """The completion of each token, int64 [C]."""
        return torch.repeat_interleave(torch.arange(len(self.lengths)), self.lengths)

    @cached_property
    def group(self) -> torch.Tensor:
        """The group of each completion, int64 [N], numbered from 0."""
        return self.groups.unique(return_inverse=True)[1]

    @property
    def group_sizes(self) -> torch.Tensor:
        """Completions of each group, int64 [groups]."""
        return self.group.bincount()

    @property
    def totals(self) -> torch.Tensor:
        """All that each completion earned, [N]; float64, in which the mean of equal float32 rewards
        is exactly they.
        """
        return self.rewards + sum_by_sequence(
            self.token_rewards.double(), self.sequence, len(self.rewards)
        )

    @property
    def earned(self) -> torch.Tensor:
        """What each token earned, float64 [C]: its own reward, and the last one its completion's
        too.
        """
        earned = self.token_rewards.double()
        nonempty = self.lengths > 0
        return earned.index_add(
            0, self.lengths.cumsum(0)[nonempty] - 1, self.rewards[nonempty].double()
        )


@dataclass(frozen=True)
class Advantages:
    """``advantages`` float32 [C]; ``returns`` float32 [C], which a critic learns, where the
    estimator has them.
    """

    advantages: torch.Tensor
    returns: torch.Tensor | None = None


class AdvantageEstimator(Configurable):
    """Base of all estimators of advantages from rewards.

    To write your own, subclass this, with a Config of its own.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        by_group: ClassVar[bool] = True
        """Whether a group's advantages hang on that group alone, so that a batch may come in
        parts."""

        needs_values: ClassVar[bool] = False
        """Whether a critic has to say what it expected."""

    config: Config

    def __init__(self, config: Config):
        self.config = config

    def __call__(self, scored: Scored) -> Advantages:
        raise NotImplementedError


def advantages_of(
    estimator: AdvantageEstimator, scored: Scored, *, with_returns: bool
) -> Advantages:
    """Advantages, and returns if a critic needs them.

    Raises RunError that names an estimator that gives others.
    """
    whose = f"algorithm.advantage: {type(estimator).__name__}"
    count = len(scored.sequence)
    with naming(whose):
        found = estimator(scored)
    if not isinstance(found, Advantages):
        raise RunError(
            f"{whose} returned {shown(found)}; expected is Advantages(advantages, returns)"
        )
    check_per_token(f"{whose} (advantages)", found.advantages, count)
    if with_returns or found.returns is not None:
        check_per_token(f"{whose} (returns)", found.returns, count)
    return found


class GroupAdvantage(AdvantageEstimator):
    """Reward of a completion minus its group's mean, by default divided by the group's standard
    deviation.

    With the division: GRPO, arXiv:2402.03300, section 4.1.2. Without: Dr. GRPO, arXiv:2503.20783,
    eq. 2. A group whose completions all have the same reward gets advantages of exactly 0.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(AdvantageEstimator.Config):
        normalize_std: bool = True
        """Whether to divide by the standard deviation of the group."""

    config: Config

    def __call__(self, scored: Scored) -> Advantages:
        totals = scored.totals
        group = scored.group
        sizes = scored.group_sizes
        centred = totals - (sum_by_sequence(totals, group) / sizes)[group]
        if self.config.normalize_std:
            variance = sum_by_sequence(centred.square(), group) / (sizes - 1).clamp(min=1)
            centred = centred / (variance.sqrt()[group] + 1e-6)
        return Advantages(centred.float()[scored.sequence])


class LeaveOneOut(AdvantageEstimator):
    """Reward of a completion minus the mean of the others of its group: RLOO, arXiv:2402.14740, eq.
    8.

    Raises RunError if a group has one completion only.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(AdvantageEstimator.Config):
        pass

    def __call__(self, scored: Scored) -> Advantages:
        totals = scored.totals
        group = scored.group
        sizes = scored.group_sizes
        if (sizes < 2).any():
            raise RunError(
                "LeaveOneOut compares the completions of a prompt: sample at least two of each"
            )
        others = (sum_by_sequence(totals, group)[group] - totals) / (sizes[group] - 1)
        return Advantages((totals - others).float()[scored.sequence])


class ReinforcePlusPlus(AdvantageEstimator):
    """Sum of rewards from each token on, whitened over all tokens: REINFORCE++,
    arXiv:2501.03262.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(AdvantageEstimator.Config):
        by_group: ClassVar[bool] = False

        gamma: Annotated[float, SHARE] = 1.0
        """Discount per token."""

        baseline: Literal["none", "group_mean"] = "none"
        """Baseline of each reward. ``group_mean`` subtracts its group's mean first, the paper's
        REINFORCE++-baseline."""

    config: Config

    def __call__(self, scored: Scored) -> Advantages:
        if self.config.baseline == "group_mean":
            rewards = scored.rewards.double()
            means = sum_by_sequence(rewards, scored.group) / scored.group_sizes
            scored = replace(scored, rewards=rewards - means[scored.group])
        return Advantages(_whitened(_discounted(scored.earned, scored, self.config.gamma)).float())


class GAE(AdvantageEstimator):
    """Generalized advantage estimation on a critic's values, arXiv:1506.02438, eq. 16.

    Returns are advantages plus values, before whitening. Raises RunError without values.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(AdvantageEstimator.Config):
        by_group: ClassVar[bool] = False
        needs_values: ClassVar[bool] = True

        gamma: Annotated[float, SHARE] = 1.0
        """Discount per token."""

        lam: Annotated[float, SHARE] = 0.95
        """Lambda. 0 uses the critic's next value alone, 1 uses rewards alone."""

        whiten: bool = True
        """Whether to scale advantages to mean 0 and standard deviation 1 over all tokens."""

    config: Config

    def __call__(self, scored: Scored) -> Advantages:
        if scored.values is None:
            raise RunError(
                "GAE needs the values of a critic: configure one, or an estimator that needs none"
            )
        config = self.config
        values = scored.values.double()
        sequence = scored.sequence
        following = torch.zeros_like(values)
        following[:-1] = values[1:] * (sequence[1:] == sequence[:-1])
        surprise = scored.earned + config.gamma * following - values
        advantages = _discounted(surprise, scored, config.gamma * config.lam)
        returns = (advantages + values).float()
        return Advantages((_whitened(advantages) if config.whiten else advantages).float(), returns)


def overlong_penalty(lengths: torch.Tensor, *, max_tokens: int, buffer: int) -> torch.Tensor:
    """Reward [N] for completions of ``lengths`` [N]: DAPO's soft overlong punishment,
    arXiv:2503.14476, eq. 13.

    0 up to ``max_tokens - buffer`` tokens, then falling to -1 at ``max_tokens``; ``buffer`` is
    above 0.
    """
    return ((max_tokens - buffer - lengths) / buffer).clamp(-1.0, 0.0)


def _discounted(values: torch.Tensor, scored: Scored, factor: float) -> torch.Tensor:
    """Each token's value plus ``factor`` times that of the next, and so on to the completion's end,
    [C].

    Spans of tokens already summed double in each round, so there are as many as the longest length
    has bits.
    """
    sequence = scored.sequence
    span = 1
    longest = int(scored.lengths.max())
    while span < longest:
        ahead = values[span:] * (sequence[span:] == sequence[:-span])
        values = torch.cat([values[:-span] + factor**span * ahead, values[-span:]])
        span *= 2
    return values


def _whitened(values: torch.Tensor) -> torch.Tensor:
    return (values - values.mean()) / (values.std(correction=0) + 1e-8)
