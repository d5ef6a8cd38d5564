"""Advantages: estimators of how much better each token was than expected."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, ClassVar, Literal

import torch
from torchtitan.config import Configurable

from rl.algorithms.tokens import check_per_token, sum_by_sequence
from rl.errors import RunError, naming, shown
from rl.types.rules import SHARE, SIGNED

Unit = Literal["token", "turn"]
"""Unit of a discount: the discount applies once per sampled token or once per turn."""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """N completions with their rewards; their C tokens are concatenated, those of a completion in
    the order of time.
    """

    rewards: torch.Tensor
    """Reward of each whole completion, float32 [N]."""

    groups: torch.Tensor
    """ID of the prompt of each completion, int64 [N]; equal for completions of one prompt."""

    lengths: torch.Tensor
    """Number of tokens of each completion, int64 [N]."""

    token_rewards: torch.Tensor
    """Reward of each token, float32 [C]: minus the KL penalty if the reward includes one, otherwise
    0."""

    values: torch.Tensor | None = None
    """A critic's value before each token, float32 [C]."""

    turn_rewards: torch.Tensor | None = None
    """Part of ``rewards`` that each token gets, float32 [C]. The last token of a completion also
    gets the rest of the completion's reward. None: the last token gets the whole reward."""

    turn_ends: torch.Tensor | None = None
    """Whether each token is the last one of a turn, bool [C]. None: a completion is one turn."""

    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Metric of the task for each completion, float64 [N], by name: those of ``Config.metrics``."""

    @cached_property
    def sequence(self) -> torch.Tensor:
        """Index of the completion of each token, int64 [C]."""
        return torch.repeat_interleave(torch.arange(len(self.lengths)), self.lengths)

    @cached_property
    def group(self) -> torch.Tensor:
        """Index of the group of each completion, int64 [N], from 0."""
        return self.groups.unique(return_inverse=True)[1]

    @property
    def group_sizes(self) -> torch.Tensor:
        """Number of completions of each group, int64 [groups]."""
        return self.group.bincount()

    @property
    def totals(self) -> torch.Tensor:
        """Sum of ``rewards`` and ``token_rewards`` of each completion, float64 [N].

        In float64, the mean of equal float32 rewards is exactly that reward.
        """
        tokens = self.token_rewards.double()
        return self.rewards + sum_by_sequence(tokens, self.sequence, len(self.rewards))

    @property
    def earned(self) -> torch.Tensor:
        """Reward of each token, float64 [C]: its own ``token_rewards`` and ``turn_rewards``.

        The last token of a completion also gets the rest of the completion's reward: ``rewards``
        minus the completion's ``turn_rewards``.
        """
        nonempty = self.lengths > 0
        last = self.lengths.cumsum(0)[nonempty] - 1
        earned = self.token_rewards.double()
        rest = self.rewards.double()
        if self.turn_rewards is not None:
            by_turn = self.turn_rewards.double()
            earned = earned + by_turn
            rest = rest - sum_by_sequence(by_turn, self.sequence, len(rest))
        return earned.index_add(0, last, rest[nonempty])

    def discounts(self, factor: float, per: "Unit") -> torch.Tensor:
        """Return the discount between each token and the next token, float64 [C].

        The discount is ``factor``, except in two cases:

        - The last token of a completion has 0.
        - With ``per`` equal to ``turn``, a token that does not end a turn has 1.
        """
        sequence = self.sequence
        factors = torch.full((len(sequence),), factor, dtype=torch.float64)
        if per == "turn":
            ends = torch.zeros_like(factors, dtype=torch.bool)
            factors[~(ends if self.turn_ends is None else self.turn_ends)] = 1.0
        factors[:-1] *= sequence[1:] == sequence[:-1]
        factors[-1:] = 0.0
        return factors


@dataclass(frozen=True)
class Advantages:
    """Advantages, float32 [C], and the targets of a critic, ``returns``, float32 [C].

    ``returns`` is None if the estimator does not compute them.
    """

    advantages: torch.Tensor
    returns: torch.Tensor | None = None


class AdvantageEstimator(Configurable):
    """Base of all estimators of advantages from rewards.

    To write your own, subclass it and give the subclass its own Config.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        by_group: ClassVar[bool] = True
        """Whether the advantages of a group depend on that group alone. If so, a batch can be
        scored in parts."""

        needs_values: ClassVar[bool] = False
        """Whether the estimator needs the values of a critic."""

        by_token: ClassVar[bool] = False
        """Whether the advantages depend on which token of a completion gets a reward."""

        needs_group: ClassVar[bool] = False
        """Whether the estimator compares completions of one prompt and needs two or more."""

        @property
        def metrics(self) -> tuple[str, ...]:
            """Names of the metrics of the task's scores that the estimator reads."""
            return ()

    config: Config

    def __init__(self, config: Config):
        self.config = config

    def __call__(self, scored: Scored) -> Advantages:
        raise NotImplementedError


def advantages_of(
    estimator: AdvantageEstimator, scored: Scored, *, with_returns: bool
) -> Advantages:
    """Return the estimator's advantages, with returns if ``with_returns``.

    Raises RunError, naming the estimator, if their type, dtype or shape is wrong.
    """
    name = f"algorithm.advantage: {type(estimator).__name__}"
    count = len(scored.sequence)
    with naming(name):
        result = estimator(scored)
    if not isinstance(result, Advantages):
        raise RunError(f"{name} returned {shown(result)}; expected Advantages(...)")
    check_per_token(f"{name} (advantages)", result.advantages, count)
    if with_returns or result.returns is not None:
        check_per_token(f"{name} (returns)", result.returns, count)
    return result


class GroupAdvantage(AdvantageEstimator):
    """Reward of a completion minus its group's mean, by default divided by the group's standard
    deviation.

    With the division: GRPO, arXiv:2402.03300, section 4.1.2. Without: Dr. GRPO, arXiv:2503.20783,
    eq. 2. A group whose completions all have the same reward gets advantages of exactly 0.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(AdvantageEstimator.Config):
        needs_group: ClassVar[bool] = True

        normalize_std: bool = True
        """Whether to divide by the standard deviation of the group."""

    config: Config

    def __call__(self, scored: Scored) -> Advantages:
        centred = _centred(scored.totals, scored, normalize_std=self.config.normalize_std)
        return Advantages(centred.float()[scored.sequence])


class MaxRL(AdvantageEstimator):
    """Reward of a completion minus its group's mean, divided by that mean: MaxRL, arXiv:2602.02710.
    With rewards of 0 and 1 each prompt has a weight of about 1 / p for its success rate p, as in
    the gradient of log p.

    A group of rewards of 0 gets advantages of 0. Raises RunError if a reward is negative.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(AdvantageEstimator.Config):
        needs_group: ClassVar[bool] = True

    def __call__(self, scored: Scored) -> Advantages:
        totals = scored.totals
        least = float(totals.min())
        if least < 0:
            raise RunError(f"a reward is {least:g}; MaxRL needs rewards of at least 0")
        means = (sum_by_sequence(totals, scored.group) / scored.group_sizes)[scored.group]
        ratios = (totals - means) / torch.where(means > 0, means, 1.0)
        return Advantages(ratios.float()[scored.sequence])


class GDPO(AdvantageEstimator):
    """Weighted sum of the advantages of GRPO of several rewards, whitened over all completions of
    the batch: GDPO, arXiv:2601.05242.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(AdvantageEstimator.Config):
        by_group: ClassVar[bool] = False
        needs_group: ClassVar[bool] = True

        rewards: dict[str, Annotated[float, SIGNED]] = field(default_factory=dict)
        """Weights of the metrics of the task's scores, by name. ``reward`` is the reward, with
        penalties and reward models. Empty for the reward alone."""

        @property
        def metrics(self) -> tuple[str, ...]:
            """Names of the metrics of the task's scores that the estimator reads."""
            return tuple(name for name in self.rewards if name != "reward")

    config: Config

    def __call__(self, scored: Scored) -> Advantages:
        columns = {"reward": scored.totals, **scored.metrics}
        weights = self.config.rewards or {"reward": 1.0}
        parts = [weight * _centred(columns[name], scored) for name, weight in weights.items()]
        return Advantages(_whitened(torch.stack(parts).sum(0)).float()[scored.sequence])


class LeaveOneOut(AdvantageEstimator):
    """Reward of a completion minus the mean reward of the other completions of its group: RLOO,
    arXiv:2402.14740, eq. 8.

    Raises RunError if a group has only one completion.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(AdvantageEstimator.Config):
        needs_group: ClassVar[bool] = True

    def __call__(self, scored: Scored) -> Advantages:
        totals = scored.totals
        group = scored.group
        sizes = scored.group_sizes
        if (sizes < 2).any():
            raise RunError("LeaveOneOut needs at least two completions of each prompt")
        others = (sum_by_sequence(totals, group)[group] - totals) / (sizes[group] - 1)
        return Advantages((totals - others).float()[scored.sequence])


class ReinforcePlusPlus(AdvantageEstimator):
    """REINFORCE++, arXiv:2501.03262: the discounted sum of the rewards from each token on, whitened
    over all tokens of the batch.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(AdvantageEstimator.Config):
        by_group: ClassVar[bool] = False
        by_token: ClassVar[bool] = True

        gamma: Annotated[float, SHARE] = 1.0
        """Discount per token, or per turn by ``discount_per``."""

        discount_per: Unit = "token"
        """Unit of ``gamma``: see :class:`GAE`."""

        baseline: Literal["none", "group_mean"] = "none"
        """Baseline that is subtracted from each completion's reward. ``group_mean`` is the mean
        reward of the group: the paper's REINFORCE++-baseline."""

        @property
        def needs_group(self) -> bool:  # type: ignore[override]
            return self.baseline == "group_mean"

        @property
        def has_discount(self) -> bool:
            """Whether the unit of the discount matters."""
            return self.gamma < 1

    config: Config

    def __call__(self, scored: Scored) -> Advantages:
        if self.config.baseline == "group_mean":
            rewards = scored.rewards.double()
            means = sum_by_sequence(rewards, scored.group) / scored.group_sizes
            scored = replace(scored, rewards=rewards - means[scored.group])
        factors = scored.discounts(self.config.gamma, self.config.discount_per)
        return Advantages(_whitened(_discounted(scored.earned, factors)).float())


class GAE(AdvantageEstimator):
    """Generalized advantage estimation on a critic's values, arXiv:1506.02438, eq. 16.

    Returns are advantages plus values, before whitening. Raises RunError without values.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(AdvantageEstimator.Config):
        by_group: ClassVar[bool] = False
        needs_values: ClassVar[bool] = True
        by_token: ClassVar[bool] = True

        gamma: Annotated[float, SHARE] = 1.0
        """Discount per token, or per turn by ``discount_per``."""

        lam: Annotated[float, SHARE] = 0.95
        """Lambda. 0 uses the critic's next value alone, 1 uses rewards alone."""

        discount_per: Unit = "token"
        """Unit of ``gamma`` and ``lam``.

        - ``token``: They act between every two consecutive sampled tokens.
        - ``turn``: They act between the last token of an answer and the first token of the next
          answer. Within an answer both are 1. Requires an environment as the task.

        Tokens that the environment produced are not actions, so they add no discount."""

        whiten: bool = True
        """Whether to scale advantages to mean 0 and standard deviation 1 over all tokens."""

        @property
        def has_discount(self) -> bool:
            """Whether the unit of the discounts matters."""
            return self.gamma * self.lam < 1

    config: Config

    def __call__(self, scored: Scored) -> Advantages:
        if scored.values is None:
            raise RunError("GAE needs the values of a critic: configure one")
        config = self.config
        values = scored.values.double()
        per = config.discount_per
        following = torch.cat([values[1:], values[:1]])
        residuals = scored.earned + scored.discounts(config.gamma, per) * following - values
        advantages = _discounted(residuals, scored.discounts(config.gamma * config.lam, per))
        returns = (advantages + values).float()
        return Advantages((_whitened(advantages) if config.whiten else advantages).float(), returns)


def overlong_penalty(lengths: torch.Tensor, *, max_tokens: int, buffer: int) -> torch.Tensor:
    """Return the reward [N] of completions of ``lengths`` [N] under DAPO's soft overlong
    punishment, arXiv:2503.14476, eq. 13.

    The reward is 0 up to ``max_tokens - buffer`` tokens and falls linearly to -1 at ``max_tokens``.
    ``buffer`` must be above 0.
    """
    return ((max_tokens - buffer - lengths) / buffer).clamp(-1.0, 0.0)


def _centred(rewards: torch.Tensor, scored: Scored, *, normalize_std: bool = True) -> torch.Tensor:
    """Return ``rewards``, float64 [N], minus the mean of each group, by default divided by the
    group's standard deviation.
    """
    group = scored.group
    sizes = scored.group_sizes
    centred = rewards - (sum_by_sequence(rewards, group) / sizes)[group]
    if not normalize_std:
        return centred
    variance = sum_by_sequence(centred.square(), group) / (sizes - 1).clamp(min=1)
    return centred / (variance.sqrt()[group] + 1e-6)


def _discounted(values: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return the discounted sums [C]: result[t] = values[t] + factors[t] * result[t + 1].

    A factor of 0 ends a completion. Each round doubles the number of values in a sum, so n tokens
    in the longest completion take about log2(n) rounds.
    """
    span = 1
    while factors.any():
        values = torch.cat([values[:-span] + factors[:-span] * values[span:], values[-span:]])
        factors = torch.cat([factors[:-span] * factors[span:], torch.zeros_like(factors[-span:])])
        span *= 2
    return values


def _whitened(values: torch.Tensor) -> torch.Tensor:
    return (values - values.mean()) / (values.std(correction=0) + 1e-8)
