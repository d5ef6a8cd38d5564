"""What a step's groups teach: the algorithm, in whole batches."""

import asyncio
import dataclasses
import random
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from rl.algorithms.advantages import Scored, advantages_of, overlong_penalty
from rl.algorithms.corrections import correction_weights
from rl.algorithms.kl import kl
from rl.algorithms.losses import batch_denominator
from rl.config import RLConfig
from rl.observe.metrics import Metrics, Value
from rl.rollout.batch import make_batch, whole_texts
from rl.session.session import Session
from rl.step_folders import StepFolders
from rl.trainers.ledger import Group
from rl.types import Batch, Rollout


class PolicyGradient:
    """Has the policy learn from groups; how often it steps on them is the config's. ::

        batch = await learner.prepare(groups)           # with what advantages and loss need to know
        for mini in learner.minibatches(batch, step):
            await learner.accumulate(mini)
            metrics = await learner.update()            # one optimizer step

    A reference policy, where there is one, is what the policy was at first, or
    ``reference.refresh_every`` steps ago at most. ``folder`` keeps what it was last, and what it
    was at each of ``checkpoints``.
    """

    def __init__(self, config: RLConfig, session: Session, folder: Path, checkpoints: StepFolders):
        algorithm = config.algorithm
        self._config = config
        self._algorithm = algorithm
        self._session = session
        self._folder = folder
        self._checkpoints = checkpoints
        self._advantage = algorithm.advantage.build()
        self._corrections = [correction.build() for correction in algorithm.corrections]
        self._adaptive_kl = algorithm.adaptive_kl.build()
        self._kl_coef = algorithm.kl_coef
        self._columns = columns_of(config)
        self._scoring = {
            name: role.reward_weight for name, role in config.roles.items() if role.reward_weight
        }
        self._learning = ["trainer", *(["critic"] if session.has("critic") else [])]
        self._prepared: list[Metrics] = []
        self._completions = self._reference = (
            0  # the latter is the step whose policy the reference is
        )

    async def load(self, step: int, state: dict[str, Any]) -> None:
        """Go back to what was after ``step``; ``state`` is what that checkpoint has of it."""
        self._kl_coef = state.get("kl_coef", self._algorithm.kl_coef)
        self._prepared = []
        self._completions = 0
        for role in self._config.roles:
            await self._session.init_model(role)
        if self._session.has("critic"):
            await self._session.load(step, role="critic")
        if self._session.has("reference"):
            self._reference = state.get("reference", 0)
            newer = [
                folder for saved, folder in self._references().items() if saved > self._reference
            ]
            for folder in (
                *newer,
                *self._folder.glob("policy-*.partial"),
            ):  # of steps that are taken again
                shutil.rmtree(folder)
            if self._reference:
                await self._session.load_weights(
                    self._folder / f"policy-{self._reference}", role="reference"
                )
            else:
                await self._session.init_model("reference")

    async def save(self, step: int, state: dict[str, Any]) -> None:
        """Write checkpoint ``step``, with ``state`` in it; the policy's, which says where the run
        is, comes last.
        """
        if self._session.has("critic"):
            await self._session.save(step, role="critic")
        algorithm = {"kl_coef": self._kl_coef, "reference": self._reference}
        await self._session.save(step, state | {"algorithm": algorithm})

    async def prepare(self, groups: list[Group]) -> Batch:
        """The batch of ``groups``, with a column for all that the loss needs."""
        rollouts = [rollout for group in groups for rollout in group]
        reduction = self._algorithm.loss.reduction
        longest = self._config.rollout.max_tokens
        batch = make_batch(rollouts, reduction=reduction, max_tokens=longest)
        await self._ask_models(batch)
        lengths = torch.tensor([rollout.sampled_count for rollout in rollouts])
        rewards = torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float32)
        if buffer := self._algorithm.overlong_buffer:
            rewards += overlong_penalty(lengths, max_tokens=longest, buffer=buffer)
        metrics, token_rewards = self._penalty(batch)
        for role, weight in self._scoring.items():
            scores = await self._scores(role, rollouts)
            rewards = rewards + weight * scores
            metrics = metrics | {f"{role}/score": float(scores.mean())}
        scored = Scored(
            rewards=rewards,
            groups=torch.tensor([rollout.prompt.prompt_id for rollout in rollouts]),
            lengths=lengths,
            token_rewards=token_rewards,
            values=batch.columns["old_values"][batch.loss_mask]
            if "old_values" in batch.columns
            else None,
        )
        found = advantages_of(self._advantage, scored, with_returns="critic" in self._learning)
        batch.columns["advantages"] = batch.scatter(found.advantages)
        if found.returns is not None:
            batch.columns["returns"] = batch.scatter(found.returns)
        if self._corrections:
            metrics |= self._correct(batch, scored.sequence)
        weight = len(scored.sequence)
        self._prepared.append(
            Metrics({name: Value(value, "mean", weight) for name, value in metrics.items()})
        )
        return batch

    def minibatches(self, batch: Batch, step: int) -> list[Batch]:
        """What each optimizer step of ``step`` is on: the whole batch, or in each epoch a new cut
        of it.
        """
        if self._config.updates_per_step == 1:
            return [batch]
        count = self._config.updates_per_step // self._algorithm.update_epochs
        cut = list[Batch]()
        for epoch in range(self._algorithm.update_epochs):
            order = list(range(len(batch)))
            random.Random(f"{self._config.seed}/update/{step}/{epoch}").shuffle(order)
            cut += [batch.select(sorted(order[part::count])) for part in range(count)]
        return cut

    async def accumulate(self, batch: Batch) -> None:
        """Add the gradient of the loss on ``batch``, side by side with that of the critic's."""
        staleness = self._session.version - batch.columns["versions"]
        batch = dataclasses.replace(batch, columns=batch.columns | {"staleness": staleness})
        loss = self._algorithm.loss
        temperature = self._config.rollout.temperature
        if loss.kl_coef:
            loss = dataclasses.replace(loss, kl_coef=self._kl_coef)
        losses = {"trainer": loss, "critic": self._config.critic.loss}
        await asyncio.gather(
            *(
                self._session.forward_backward(
                    batch, losses[role], role=role, temperature=temperature
                )
                for role in self._learning
            )
        )
        self._completions += len(batch)

    async def update(self) -> Metrics:
        """One optimizer step on what was accumulated; its metrics."""
        denominator = batch_denominator(self._completions, self._algorithm.loss.reduction)
        self._completions = 0
        policy, *critic = await asyncio.gather(
            *(
                self._session.optim_step(role=role, denominator=denominator)
                for role in self._learning
            )
        )
        for each in critic:
            policy |= each.renamed(lambda name: f"critic/{name.removeprefix('trainer/')}")
        return policy

    async def finish(self, step: int) -> dict[str, float]:
        """After the last update of ``step``: metrics of what was prepared for it."""
        metrics = dict(Metrics.merged(self._prepared))
        self._prepared = []
        if self._kl_coef:
            self._kl_coef = self._adaptive_kl.update(self._kl_coef, metrics["kl/reference"])
        await self._refresh(step)
        return metrics

    async def _ask_models(self, batch: Batch) -> None:
        """Columns of what the models say of the batch's tokens, all of them side by side."""
        temperature = self._config.rollout.temperature
        answers = await asyncio.gather(
            *(
                self._session.forward(batch, role=role, temperature=temperature)
                for role in self._columns
            )
        )
        for (output, column), answer in zip(self._columns.values(), answers, strict=True):
            batch.columns[column] = answer[output]

    async def _scores(self, role: str, rollouts: list[Rollout]) -> torch.Tensor:
        """What a reward model says of each completion, [N]."""
        batch, ends = whole_texts(rollouts)
        return (await self._session.forward(batch, role=role, temperature=1.0))["values"][ends]

    def _penalty(self, batch: Batch) -> tuple[dict[str, float], torch.Tensor]:
        """Metrics of the distance to the reference, and the reward of each completion token for it,
        [C].
        """
        mask = batch.loss_mask
        columns = batch.columns
        nothing = torch.zeros(int(mask.sum()))
        if "reference_logprobs" not in columns:
            return {}, nothing
        policy = columns[self._algorithm.proximal_column][mask]
        reference = columns["reference_logprobs"][mask]
        metrics = {
            "kl/reference": float(kl(policy, reference, "k3").mean()),
            "kl/coef": self._kl_coef,
        }
        if not self._algorithm.reward_kl_coef:
            return metrics, nothing
        return metrics, -self._kl_coef * kl(policy, reference, self._algorithm.reward_kl_estimator)

    def _correct(self, batch: Batch, sequence: torch.Tensor) -> dict[str, float]:
        """The column that weighs what was not drawn from the weights it trains; its metrics."""
        mask = batch.loss_mask
        columns = batch.columns
        weights, metrics = correction_weights(
            self._corrections,
            columns["proximal_logprobs"][mask],
            columns["behaviour_logprobs"][mask],
            self._session.version - columns["versions"][mask],
            sequence,
        )
        columns["correction"] = batch.scatter(weights)
        return metrics

    async def _refresh(self, step: int) -> None:
        """Have the reference be what the policy is if it is time, and delete what no checkpoint
        needs.
        """
        every = self._config.reference.refresh_every
        if not (self._session.has("reference") and every and step % every == 0):
            return
        await self._session.copy_weights("trainer", "reference", self._folder / f"policy-{step}")
        self._reference = step
        saved = self._references()
        needed = {
            max((each for each in saved if each <= at), default=0)
            for at in (*self._checkpoints.steps(), step)
        }
        for each in saved.keys() - needed:
            shutil.rmtree(saved[each])

    def _references(self) -> dict[int, Path]:
        """Folders of the policies that were references, by the step they are of."""
        named = (
            (re.fullmatch(r"policy-(\d+)", folder.name), folder)
            for folder in self._folder.glob("policy-*")
        )
        return {int(name[1]): folder for name, folder in named if name}


def columns_of(config: RLConfig) -> dict[str, tuple[str, str]]:
    """By role, which of a model's outputs becomes which column of a batch."""
    algorithm = config.algorithm
    columns = dict[str, tuple[str, str]]()
    if algorithm.recomputes:
        columns["trainer"] = ("logprobs", "proximal_logprobs")
    if algorithm.kl_coef:
        columns["reference"] = ("logprobs", "reference_logprobs")
    if algorithm.advantage.needs_values:
        columns["critic"] = ("values", "old_values")
    return columns | {
        name: (role.head, role.column) for name, role in config.roles.items() if role.column
    }
