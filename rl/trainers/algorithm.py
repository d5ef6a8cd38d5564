"""Algorithms: the protocol between the RL loop and an algorithm, and policy gradients."""

import asyncio
import functools
import random
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import torch
from torchtitan.config import Configurable

from rl.algorithms.advantages import Scored, advantages_of, overlong_penalty
from rl.algorithms.batch import (
    by_player,
    counts_of,
    make_batch,
    split_by_player,
    task_metrics,
    time_order,
    turn_ends,
    turn_rewards,
    whole_texts,
    without,
)
from rl.algorithms.corrections import correction_weights
from rl.algorithms.kl import kl
from rl.algorithms.loss_results import moments
from rl.algorithms.losses import Reduction
from rl.config import AlgorithmConfig, PolicyGradientConfig, RLConfig
from rl.errors import RunError
from rl.metrics import Entry, Metrics
from rl.session.session import Session
from rl.types import Batch, Rollout


class Algorithm(Configurable, ABC):
    """Base class of all RL algorithms. To use your own algorithm, subclass it in any package.

    The RL loop makes these calls in each step; ``session`` holds the models. ::

        batch = await algorithm.prepare(session, rollouts)        # columns of models, then score
        for minibatch in algorithm.minibatches(batch, step):
            await algorithm.accumulate(session, minibatch)
            metrics = await algorithm.update(session)             # one optimizer step

    A subclass defines how a batch is scored, and the loss::

        class BestOfGroup(Algorithm):
            @dataclass(kw_only=True, slots=True)
            class Config(Algorithm.Config):
                margin: float = 0.0

            def score(self, batch, rollouts, rewards):
                batch.columns["advantages"] = ...
                return {"best/share": ...}

            def loss(self, role):
                return grpo()
    """

    Config = AlgorithmConfig

    def __init__(self, config: AlgorithmConfig, *, run: RLConfig):
        self.config = config
        self.run = run
        self.temperature = run.rollout.temperature
        self._columns = config.columns()
        self._mixed = {name: role for name, role in run.roles.items() if role.column}
        self._reward_weights = {
            name: role.reward_weight for name, role in run.roles.items() if role.reward_weight
        }
        self._learning = ["trainer", *(role for role in config.roles() if role == "critic")]
        self._prepared: list[Metrics] = []
        self._rollouts = 0
        self._is_masked = True

    @property
    def reduction(self) -> Reduction:
        """Reduction of the tokens' losses: ``reduction`` of the loss of ``trainer``, or
        ``token_mean`` if that loss has none.
        """
        return getattr(self.loss("trainer"), "reduction", "token_mean")

    @abstractmethod
    def score(
        self, batch: Batch, rollouts: Sequence[Rollout], rewards: torch.Tensor
    ) -> dict[str, Entry]:
        """Add the columns that the loss reads to ``batch``; return metrics.

        ``rewards``, float32 [N], are the rollouts' rewards plus the weighted scores of reward
        models. The batch already has all columns of ``Config.columns``. A metric that is a float is
        averaged over the sampled tokens of a step; a :class:`rl.metrics.Value` has its own
        reduction and weight.
        """

    @abstractmethod
    def loss(self, role: str) -> Configurable.Config:
        """Return the loss of ``trainer`` or ``critic``."""

    def reward_key(self, rollout: Rollout) -> Hashable:
        """Return all that the reward of ``rollout`` in training depends on, without KL penalties.

        A group whose rollouts have one value teaches nothing. The score of a reward model depends
        on the tokens that it reads.
        """
        if not self._reward_weights:
            return rollout.reward
        return rollout.reward, rollout.sequences[-1].tokens.tobytes()

    def minibatches(self, batch: Batch, step: int) -> list[Batch]:
        """Return one batch for each optimizer step of ``step``, ``Config.updates`` in all."""
        return [batch]

    def denominator(self, rollouts: int) -> float | None:
        """Return the divisor of the loss summed over ``rollouts`` rollouts; None for the divisor of
        ``reduction``.
        """
        return None

    def end_step(self, metrics: Mapping[str, float]) -> None:
        """Adapt to the metrics that ``score`` returned. Called after the last update of a step."""

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-able state for a checkpoint."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state that ``to_dict`` returned; an empty dict restores the initial state."""
        self._prepared = []
        self._rollouts = 0
        self._is_masked = True

    def rehearse(self, groups: int, samples: int) -> None:
        """Run user-defined parts on ``groups`` groups of ``samples`` made-up rollouts, to find
        errors before any process starts.
        """

    async def prepare(self, session: Session, rollouts: Sequence[Rollout]) -> Batch:
        """Return the batch of ``rollouts``, with every column that the loss reads."""
        longest = self.run.rollout.max_tokens
        batch = make_batch(rollouts, reduction=self.reduction, max_tokens=longest)
        forward = functools.partial(session.forward, batch, temperature=self.temperature)
        needed = dict(self._columns)
        has_bits = self.run.parity == "bitwise" and needed.get("trainer", [""])[0] == "logprobs"
        if has_bits and (batch.columns["versions"][batch.loss_mask] == session.version).all():
            # generators computed the same bits
            batch.columns[needed.pop("trainer")[1]] = batch.columns["behaviour_logprobs"]
        outputs, mixed = await asyncio.gather(
            asyncio.gather(*(forward(role=role) for role in needed)),
            asyncio.gather(*(self._output(session, batch, rollouts, name) for name in self._mixed)),
        )
        for (name, column), output in zip(needed.values(), outputs, strict=True):
            batch.columns[column] = output[name]
        for column in dict.fromkeys(role.column for role in self._mixed.values()):
            batch.columns[column] = self._mean(column, mixed, len(batch.tokens))
        rewards = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float32)
        scores = dict[str, Entry]()
        if self._reward_weights:
            texts, ends = whole_texts(rollouts)
        for role, weight in self._reward_weights.items():
            values = (await session.forward(texts, role=role))["values"][ends]
            rewards = rewards + weight * values
            scores[f"{role}/score"] = float(values.mean())
        batch.columns["staleness"] = session.version - batch.columns["versions"]
        metrics = self.score(batch, rollouts, rewards) | scores
        self._prepared.append(Metrics(metrics, weight=float(batch.loss_mask.sum())))
        if self.config.mask_truncated:
            return without(batch, [rollout.is_truncated for rollout in rollouts])
        return batch

    async def _output(
        self, session: Session, batch: Batch, rollouts: Sequence[Rollout], name: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the indices of the tokens that the model ``name`` of ``roles`` is for, and its
        outputs for them.
        """
        role = self._mixed[name]
        rows = [
            row
            for rollout, places in zip(rollouts, batch.rows_by_rollout, strict=True)
            if not role.tasks or rollout.prompt.task.split("/")[0] in role.tasks
            for row in places
        ]
        place = batch.token_index(rows)
        if not rows:
            return place, torch.empty(0)
        part = batch if len(rows) == len(batch) else batch.select(rows)
        outputs = await session.forward(part, temperature=self.temperature, role=name)
        return place, outputs[role.head]

    def _mean(
        self, column: str, outputs: Sequence[tuple[torch.Tensor, torch.Tensor]], count: int
    ) -> torch.Tensor:
        """Return ``column``, float32 [count]: the weighted mean of ``outputs``, those of all
        models in ``roles``. Raises RunError if a token has none.
        """
        total = torch.zeros(count, dtype=torch.float64)
        shares = torch.zeros_like(total)
        for role, (place, values) in zip(self._mixed.values(), outputs, strict=True):
            if role.column == column:
                total[place] += role.share * values.double()
                shares[place] += role.share
        if not shares.all():
            raise RunError(f"roles: no model gives the column {column} for a rollout's task")
        return (total / shares).float()

    async def accumulate(self, session: Session, batch: Batch) -> dict[str, torch.Tensor]:
        """Add the gradients of the losses on ``batch``; trainer and critic run concurrently.

        Returns the trainer's outputs, ``logprobs`` and ``entropy`` of each token.
        """
        batch.columns["staleness"] = session.version - batch.columns["versions"]
        backward = functools.partial(session.forward_backward, batch, temperature=self.temperature)
        (outputs, _), *_ = await asyncio.gather(
            *(backward(self.loss(role), role=role) for role in self._learning)
        )
        self._rollouts += len(batch.rows_by_rollout)
        self._is_masked = self._is_masked and not batch.loss_mask.any()
        return outputs

    async def update(self, session: Session) -> Metrics:
        """Take one optimizer step on the accumulated gradients; return its metrics."""
        # Every rollout may be masked: then the step is one on gradients of 0.
        denominator = 1.0 if self._is_masked else self.denominator(self._rollouts)
        self._rollouts = 0
        self._is_masked = True
        metrics, *critic = await asyncio.gather(
            *(session.optim_step(role=role, denominator=denominator) for role in self._learning)
        )
        for figures in critic:
            metrics |= figures.renamed(lambda name: f"critic/{name.removeprefix('trainer/')}")
        return metrics

    def finish(self) -> dict[str, float]:
        """End a step; return the metrics of its prepared batches."""
        metrics = dict(Metrics.merged(self._prepared))
        self._prepared = []
        self.end_step(metrics)
        return metrics


class PolicyGradient(Algorithm):
    """Policy gradient: an estimator of advantages, a loss of importance ratios, and one or several
    optimizer steps on each batch.
    """

    Config = PolicyGradientConfig
    config: PolicyGradientConfig

    def __init__(self, config: PolicyGradientConfig, *, run: RLConfig):
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
        return replace(loss, kl_coef=self._kl_coef) if loss.kl_coef else loss

    def score(
        self, batch: Batch, rollouts: Sequence[Rollout], rewards: torch.Tensor
    ) -> dict[str, Entry]:
        """Add ``advantages``, and ``returns`` and ``correction`` if the config asks for them."""
        rewards = rewards + self._overlong(counts_of(rollouts))
        groups = torch.tensor([rollout.prompt.prompt_id for rollout in rollouts])
        if self.config.credit == "player":
            rollouts, rewards, groups = split_by_player(rollouts, rewards)
        metrics = dict[str, Entry]()
        penalty, token_rewards = self._penalty(batch)
        values = batch.columns.get("old_values")
        order = time_order(rollouts)
        scored = Scored(
            rewards=rewards,
            groups=groups,
            lengths=counts_of(rollouts),
            token_rewards=token_rewards[order],
            values=None if values is None else values[batch.loss_mask][order],
            turn_rewards=turn_rewards(rollouts)[order] if self.config.credit != "episode" else None,
            turn_ends=turn_ends(rollouts)[order],
            metrics=task_metrics(rollouts, self.config.advantage.metrics),
        )
        with_returns = self.config.advantage.needs_values
        result = advantages_of(self._advantage, scored, with_returns=with_returns)
        place = order.argsort()
        batch.columns["advantages"] = batch.scatter(result.advantages[place])
        metrics |= penalty | moments("advantage", result.advantages)
        if result.returns is not None:
            batch.columns["returns"] = batch.scatter(result.returns[place])
        if self._corrections:
            metrics |= self._correct(batch, scored.sequence)
        return metrics

    def reward_key(self, rollout: Rollout) -> Hashable:
        """Return all that the reward of ``rollout`` in training depends on: see
        :meth:`Algorithm.reward_key`.
        """
        rewards = super().reward_key(rollout)
        if self.config.credit == "player":
            rewards = rewards, *(part.reward for *_, part in by_player([rollout]))
        parts = task_metrics([rollout], self.config.advantage.metrics).values()
        return rewards, float(self._overlong(counts_of([rollout]))), *map(float, parts)

    def minibatches(self, batch: Batch, step: int) -> list[Batch]:
        """Return the whole batch for a step of one update, else new splits in each epoch."""
        updates = self.config.updates(self.run.rollout.prompts_per_step)
        if updates == 1:
            return [batch]
        count = updates // self.config.update_epochs
        rows = batch.rows_by_rollout
        samples = self.run.rollout.samples_per_prompt
        bounds = [len(rows) * part // count for part in range(count + 1)]
        cut = list[Batch]()
        for epoch in range(self.config.update_epochs):
            groups = [*range(0, len(rows), samples)]  # which share the computation of a prompt
            random.Random(f"{self.run.seed}/update/{step}/{epoch}").shuffle(groups)
            order = [row for first in groups for row in rows[first : first + samples]]
            cut += [batch.select(sorted(chain(*order[a:b]))) for a, b in pairwise(bounds)]
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
        coef = self.config.kl_coef
        adapts = self.config.adaptive_kl.target > 0 and state.get("adapted_from", coef) == coef
        self._kl_coef = state.get("kl_coef", coef) if adapts else coef

    def rehearse(self, groups: int, samples: int) -> None:
        """Call the advantage estimator and the corrections on made-up completions."""
        completions = torch.arange(groups * samples)
        lengths = 1 + completions % 3
        zeros = torch.zeros(int(lengths.sum()))
        needs_values = self.config.advantage.needs_values
        scored = Scored(
            rewards=(completions % 2).float(),
            groups=completions // samples,
            lengths=lengths,
            token_rewards=zeros,
            values=zeros if needs_values else None,
            metrics={name: torch.zeros(len(lengths)) for name in self.config.advantage.metrics},
        )
        logprobs = zeros - 1.0
        advantages_of(self._advantage, scored, with_returns=needs_values)
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
        origin = "proximal" if self.config.recomputes else "behaviour"
        policy = columns[f"{origin}_logprobs"][mask]
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
