"""Protocol between the RL loop and an algorithm."""

import asyncio
import functools
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torchtitan.config import Configurable

from rl.algorithms.batch import make_batch, whole_texts
from rl.algorithms.losses import Reduction
from rl.metrics import Entry, Metrics
from rl.types import Batch, Rollout

if TYPE_CHECKING:
    from rl.config import RLConfig, RolloutConfig
    from rl.session.session import Session


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

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        """Facts about the algorithm that the run needs before it starts."""

        def roles(self) -> tuple[str, ...]:
            """Return the roles that the algorithm needs: any of ``reference`` and ``critic``."""
            return ()

        def columns(self) -> dict[str, tuple[str, str]]:
            """Return {role: (output, column)}: the output of a model, and the batch column that
            stores it.

            Roles are ``trainer``, ``reference``, ``critic`` and those of ``RLConfig.roles``.
            Outputs are ``logprobs``, ``entropy`` and ``values``.
            """
            return {}

        def updates(self, prompts: int) -> int:
            """Return the number of optimizer steps on the rollouts of ``prompts`` prompts."""
            return 1

        @property
        def passes(self) -> int:
            """Number of times that a step's rollouts are trained on."""
            return 1

        @property
        def by_group(self) -> bool:
            """Whether each group can be scored without the other groups of its batch."""
            return True

        def check(self, rollout: "RolloutConfig") -> None:
            """Raise ConfigError, naming the field, if the value of a field is invalid."""

    def __init__(self, config: Config, *, run: "RLConfig"):
        self.config = config
        self.run = run
        self.temperature = run.rollout.temperature
        self._columns = config.columns() | {
            name: (role.head, role.column) for name, role in run.roles.items() if role.column
        }
        self._reward_weights = {
            name: role.reward_weight for name, role in run.roles.items() if role.reward_weight
        }
        self._learning = ["trainer", *(role for role in config.roles() if role == "critic")]
        self._prepared: list[Metrics] = []
        self._rollouts = 0

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

    def seen(self, rollout: Rollout) -> Hashable:
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

    def rehearse(self, groups: int, samples: int) -> None:
        """Run user-defined parts on ``groups`` groups of ``samples`` made-up rollouts, to find
        errors before any process starts.
        """

    async def prepare(self, session: "Session", rollouts: Sequence[Rollout]) -> Batch:
        """Return the batch of ``rollouts``, with every column that the loss reads."""
        longest = self.run.rollout.max_tokens
        batch = make_batch(rollouts, reduction=self.reduction, max_tokens=longest)
        forward = functools.partial(session.forward, batch, temperature=self.temperature)
        outputs = await asyncio.gather(*(forward(role=role) for role in self._columns))
        for (name, column), output in zip(self._columns.values(), outputs, strict=True):
            batch.columns[column] = output[name]
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
        return batch

    async def accumulate(self, session: "Session", batch: Batch) -> dict[str, torch.Tensor]:
        """Add the gradients of the losses on ``batch``; trainer and critic run concurrently.

        Returns the trainer's outputs, ``logprobs`` and ``entropy`` of each token.
        """
        batch.columns["staleness"] = session.version - batch.columns["versions"]
        backward = functools.partial(session.forward_backward, batch, temperature=self.temperature)
        (outputs, _), *_ = await asyncio.gather(
            *(backward(self.loss(role), role=role) for role in self._learning)
        )
        self._rollouts += len(batch.rows_by_rollout)
        return outputs

    async def update(self, session: "Session") -> Metrics:
        """Take one optimizer step on the accumulated gradients; return its metrics."""
        denominator = self.denominator(self._rollouts)
        self._rollouts = 0
        metrics, *critic = await asyncio.gather(
            *(session.optim_step(role=role, denominator=denominator) for role in self._learning)
        )
        for each in critic:
            metrics |= each.renamed(lambda name: f"critic/{name.removeprefix('trainer/')}")
        return metrics

    def finish(self) -> dict[str, float]:
        """End a step; return the metrics of its prepared batches."""
        metrics = dict(Metrics.merged(self._prepared))
        self._prepared = []
        self.end_step(metrics)
        return metrics
