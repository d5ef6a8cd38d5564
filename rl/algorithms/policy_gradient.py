"""Policy gradients: PPO, GRPO, DAPO, RLOO, GSPO and others, as combinations of their parts."""

import dataclasses
import random
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from torchtitan.config import Configurable

from rl.algorithms.advantages import (
    AdvantageEstimator,
    GroupAdvantage,
    Scored,
    advantages_of,
    overlong_penalty,
)
from rl.algorithms.algorithm import Algorithm
from rl.algorithms.batch import counts_of, in_time, turn_ends, turn_rewards
from rl.algorithms.corrections import Correction, MaskedIS, TruncatedIS, correction_weights
from rl.algorithms.kl import AdaptiveKL, Estimator, kl
from rl.algorithms.loss_results import moments
from rl.algorithms.losses import ClippedLoss, DecoupledLoss, PolicyLoss
from rl.errors import require
from rl.metrics import Entry
from rl.rules import at_least
from rl.types import Batch, Rollout

if TYPE_CHECKING:
    from rl.config import RLConfig, RolloutConfig


class PolicyGradient(Algorithm):
    """Policy gradient: an estimator of advantages, a loss of importance ratios, and one or several
    optimizer steps on each batch.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Algorithm.Config):
        """Advantages, loss and number of optimizer steps of a batch."""

        advantage: AdvantageEstimator.Config = field(default_factory=GroupAdvantage.Config)
        """Estimator of each token's advantage."""

        loss: PolicyLoss.Config = field(default_factory=ClippedLoss.Config)
        """Loss of the policy. ``grpo()``, ``dapo()`` and other functions in
        ``rl.algorithms.losses`` return common ones."""

        corrections: tuple[Correction.Config, ...] = ()
        """Weights for tokens that other weights or another engine drew; a token's weight is the
        product of all corrections. Corrections need the trainer's own log-probs, so any correction
        implies ``recomputed`` for ``old_logprobs``."""

        old_logprobs: Literal["behaviour", "recomputed"] = "behaviour"
        """Log-probs in the denominator of the loss's importance ratio.

        - ``behaviour``: Log-probs of the generators, which drew the tokens.
        - ``recomputed``: Log-probs of the trainer before the step's first update, which takes one
          more forward pass. The ratio then does not correct for the generators' policy. Decoupled
          PPO, ``loss=DecoupledLoss.Config()``, has a weight that does."""

        reward_kl_coef: Annotated[float, at_least(0, 1e6)] = 0.0
        """Coefficient of a KL penalty against the reference policy in each token's reward. Only one
        of this and ``loss.kl_coef`` may be above 0."""

        reward_kl_estimator: Estimator = "k1"
        """Estimator of the KL divergence in the reward."""

        adaptive_kl: AdaptiveKL.Config = field(default_factory=AdaptiveKL.Config)
        """Adaptation of the KL coefficient that is above 0, in the loss or in the reward."""

        credit: Literal["episode", "turn"] = "episode"
        """Sampled tokens that get the reward, for estimators that distinguish tokens.

        - ``episode``: The last token of a rollout gets the whole reward of the rollout.
        - ``turn``: The last token of each answer gets the reward of the environment step that
          follows the answer. The last token of the rollout also gets the rest. Requires an
          environment as the task, and an estimator that distinguishes tokens."""

        overlong_buffer: Annotated[int, at_least(0, 10**8)] = 0
        """Number of tokens before ``rollout.max_tokens`` over which a completion's reward decreases
        linearly by up to 1 (DAPO, arXiv:2503.14476, section 3.4). 0 disables it."""

        update_epochs: Annotated[int, at_least(1, 10**4)] = 1
        """Number of passes over the rollouts of a step."""

        prompts_per_minibatch: Annotated[int, at_least(0, 10**6)] = 0
        """Number of prompts per optimizer step; must divide ``rollout.prompts_per_step``. The
        rollouts of a step are shuffled, by seed, step and epoch, and split into minibatches of as
        many rollouts as this number of prompts has. 0 for one minibatch."""

        @property
        def kl_coef(self) -> float:
            """Coefficient of the KL penalty, in loss or reward."""
            return self.loss.kl_coef or self.reward_kl_coef

        @property
        def recomputes(self) -> bool:
            """Whether each step first computes the trainer's log-probs of its rollouts."""
            own = self.old_logprobs == "recomputed" or self.loss.needs_proximal
            return own or bool(self.corrections)

        @property
        def proximal_column(self) -> str:
            """Name of the batch column in the denominator of the importance ratio."""
            return "proximal_logprobs" if self.recomputes else "behaviour_logprobs"

        def roles(self) -> tuple[str, ...]:
            """Return ``reference`` for a KL penalty and ``critic`` for advantages with values."""
            reference = ("reference",) if self.kl_coef else ()
            return (*reference, "critic") if self.advantage.needs_values else reference

        def columns(self) -> dict[str, tuple[str, str]]:
            """Return {role: (output, column)}: the output of a model, and the batch column that
            stores it.
            """
            columns = {"trainer": ("logprobs", "proximal_logprobs")} if self.recomputes else {}
            if self.kl_coef:
                columns["reference"] = ("logprobs", "reference_logprobs")
            if self.advantage.needs_values:
                columns["critic"] = ("values", "old_values")
            return columns

        def updates(self, prompts: int) -> int:
            """Return the number of optimizer steps on the rollouts of ``prompts`` prompts."""
            return self.update_epochs * (prompts // (self.prompts_per_minibatch or prompts))

        @property
        def passes(self) -> int:
            """Number of times that a step's rollouts are trained on."""
            return self.update_epochs

        @property
        def by_group(self) -> bool:
            """Whether each group can be scored without the other groups of its batch."""
            return self.advantage.by_group

        def check(self, rollout: "RolloutConfig") -> None:
            """Raise ConfigError, naming the field, if the value of a field is invalid."""
            prompts = rollout.prompts_per_step
            size = self.prompts_per_minibatch
            require(
                size == 0 or prompts % size == 0,
                f"algorithm.prompts_per_minibatch is {size}; it must divide "
                f"rollout.prompts_per_step={prompts}",
            )
            require(
                self.overlong_buffer <= rollout.max_tokens,
                f"algorithm.overlong_buffer is {self.overlong_buffer}; it must be at most "
                f"rollout.max_tokens={rollout.max_tokens}",
            )
            samples = rollout.samples_per_prompt
            advantage = self.advantage
            require(
                samples > 1 or not advantage.needs_group,
                f"rollout.samples_per_prompt is {samples}; it must be at least 2 with "
                f"algorithm.advantage={type(advantage).__qualname__}, which compares the "
                "completions of a prompt; GAE and ReinforcePlusPlus without a baseline do not",
            )
            self._check_kl()
            for number, correction in enumerate(self.corrections):
                is_masked = isinstance(correction, MaskedIS.Config)
                weighs = (
                    correction.weigh if is_masked else isinstance(correction, TruncatedIS.Config)
                )
                require(
                    not (weighs and isinstance(self.loss, DecoupledLoss.Config)),
                    f"algorithm.corrections.{number} weights tokens by the ratio that "
                    "algorithm.loss=DecoupledLoss has already; remove it, or set its cap in "
                    "algorithm.loss.behaviour_cap",
                )
                if isinstance(correction, MaskedIS.Config):
                    require(
                        correction.low <= correction.high,
                        f"algorithm.corrections.{number}.low is {correction.low}; it must be at "
                        f"most high={correction.high}, or every token is masked",
                    )

        def _check_kl(self) -> None:
            require(
                not (self.loss.kl_coef and self.reward_kl_coef),
                f"algorithm.reward_kl_coef is {self.reward_kl_coef}; it must be 0 with "
                f"algorithm.loss.kl_coef={self.loss.kl_coef}",
            )
            require(
                not self.loss.kl_coef or self.loss.kl_estimator != "k1",
                "algorithm.loss.kl_estimator is 'k1'; it must be 'k2' or 'k3': the gradient of k1 "
                "is 0 on average",
            )
            adaptive = self.adaptive_kl
            change = adaptive.rate * adaptive.clip
            require(
                change < 1,
                f"algorithm.adaptive_kl.rate={adaptive.rate} times "
                f"algorithm.adaptive_kl.clip={adaptive.clip} is {change}; it must be below 1",
            )
            require(
                adaptive.target == 0 or self.kl_coef > 0,
                f"algorithm.adaptive_kl.target is {adaptive.target}; it must be 0 unless "
                "algorithm.loss.kl_coef or algorithm.reward_kl_coef is above 0",
            )

    config: Config

    def __init__(self, config: Config, *, run: "RLConfig"):
        super().__init__(config, run=run)
        config.loss.build()  # fails here if the user's own loss fails
        self._advantage = config.advantage.build()
        self._corrections = [correction.build() for correction in config.corrections]
        self._adaptive_kl = config.adaptive_kl.build()
        self._kl_coef = config.kl_coef

    def loss(self, role: str) -> Configurable.Config:
        """Return the loss of ``trainer``, with the current KL coefficient, or of ``critic``."""
        if role == "critic":
            return self.run.critic.loss
        loss = self.config.loss
        return dataclasses.replace(loss, kl_coef=self._kl_coef) if loss.kl_coef else loss

    def score(
        self, batch: Batch, rollouts: Sequence[Rollout], rewards: torch.Tensor
    ) -> dict[str, Entry]:
        """Add ``advantages``, and ``returns`` and ``correction`` if the config asks for them."""
        lengths = counts_of(rollouts)
        rewards = rewards + self._overlong(lengths)
        metrics = dict[str, Entry]()
        penalty, token_rewards = self._penalty(batch)
        values = batch.columns.get("old_values")
        order = in_time(rollouts)
        scored = Scored(
            rewards=rewards,
            groups=torch.tensor([rollout.prompt.prompt_id for rollout in rollouts]),
            lengths=lengths,
            token_rewards=token_rewards[order],
            values=None if values is None else values[batch.loss_mask][order],
            turn_rewards=turn_rewards(rollouts)[order] if self.config.credit == "turn" else None,
            turn_ends=turn_ends(rollouts)[order],
        )
        with_returns = self.config.advantage.needs_values
        found = advantages_of(self._advantage, scored, with_returns=with_returns)
        place = order.argsort()
        batch.columns["advantages"] = batch.scatter(found.advantages[place])
        metrics |= penalty | moments("advantage", found.advantages)
        if found.returns is not None:
            batch.columns["returns"] = batch.scatter(found.returns[place])
        if self._corrections:
            metrics |= self._correct(batch, scored.sequence)
        return metrics

    def seen(self, rollout: Rollout) -> Hashable:
        """Return all that the reward of ``rollout`` in training depends on: see
        :meth:`Algorithm.seen`.
        """
        return super().seen(rollout), float(self._overlong(counts_of([rollout])))

    def minibatches(self, batch: Batch, step: int) -> list[Batch]:
        """Return the whole batch for a step of one update, otherwise a new split in each epoch."""
        updates = self.config.updates(self.run.rollout.prompts_per_step)
        if updates == 1:
            return [batch]
        count = updates // self.config.update_epochs
        cut = list[Batch]()
        for epoch in range(self.config.update_epochs):
            order = batch.rows_by_rollout
            random.Random(f"{self.run.seed}/update/{step}/{epoch}").shuffle(order)
            for first in range(count):
                rows = sorted(row for rollout in order[first::count] for row in rollout)
                cut.append(batch.select(rows))
        return cut

    def end_step(self, metrics: Mapping[str, float]) -> None:
        """Adapt the KL coefficient."""
        if self._kl_coef:
            self._kl_coef = self._adaptive_kl.update(self._kl_coef, metrics["kl/reference"])

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able state for a checkpoint."""
        return {"kl_coef": self._kl_coef, "adapted_from": self.config.kl_coef}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state that ``to_dict`` returned; an empty dict restores the initial state.

        An adapted KL coefficient is restored only if the config still adapts the coefficient that
        it was adapted from.
        """
        super().restore(state)
        own = self.config.kl_coef
        adapts = self.config.adaptive_kl.target > 0 and state.get("adapted_from", own) == own
        self._kl_coef = state.get("kl_coef", own) if adapts else own

    def rehearse(self, groups: int, samples: int) -> None:
        """Call the advantage estimator and the corrections on made-up completions."""
        completions = torch.arange(groups * samples)
        lengths = 1 + completions % 3
        tokens = int(lengths.sum())
        needs_values = self.config.advantage.needs_values
        scored = Scored(
            rewards=(completions % 2).float(),
            groups=completions // samples,
            lengths=lengths,
            token_rewards=torch.zeros(tokens),
            values=torch.zeros(tokens) if needs_values else None,
        )
        logprobs = torch.full((tokens,), -1.0)
        advantages_of(self._advantage, scored, with_returns=needs_values)
        zeros = torch.zeros(tokens)
        correction_weights(self._corrections, logprobs, logprobs, zeros, scored.sequence)

    def _overlong(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return the penalty [N] of the config for completions of ``lengths`` [N]."""
        longest = self.run.rollout.max_tokens
        if buffer := self.config.overlong_buffer:
            return overlong_penalty(lengths, max_tokens=longest, buffer=buffer)
        return torch.zeros(len(lengths))

    def _penalty(self, batch: Batch) -> tuple[dict[str, Entry], torch.Tensor]:
        """Return metrics of the KL divergence from the reference, and the token rewards [C]: minus
        the KL penalty of each sampled token, or 0 if the reward has no KL penalty.
        """
        mask = batch.loss_mask
        columns = batch.columns
        zeros = torch.zeros(int(mask.sum()))
        if "reference_logprobs" not in columns:
            return {}, zeros
        policy = columns[self.config.proximal_column][mask]
        reference = columns["reference_logprobs"][mask]
        distance = float(kl(policy, reference, "k3").mean())
        metrics: dict[str, Entry] = {"kl/reference": distance, "kl/coef": self._kl_coef}
        if not self.config.reward_kl_coef:
            return metrics, zeros
        return metrics, -self._kl_coef * kl(policy, reference, self.config.reward_kl_estimator)

    def _correct(self, batch: Batch, sequence: torch.Tensor) -> dict[str, Entry]:
        """Add the column ``correction``; return metrics."""
        names = ("proximal_logprobs", "behaviour_logprobs", "staleness")
        proximal, behaviour, staleness = (batch.columns[name][batch.loss_mask] for name in names)
        weights, metrics = correction_weights(
            self._corrections, proximal, behaviour, staleness, sequence
        )
        batch.columns["correction"] = batch.scatter(weights)
        return metrics
