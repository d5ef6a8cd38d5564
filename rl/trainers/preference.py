"""Preference training and reward models: losses over whole sequences."""

import asyncio
from pathlib import Path
from typing import Any

import torch

from rl.algorithms.sequence_losses import KTOLoss, Labels, SequenceLoss
from rl.algorithms.sequence_scores import (
    LinearLoss,
    coefficients,
    score_batch,
    sequence_scores,
    with_coefficients,
    with_mismatched,
)
from rl.config import DatasetConfig, PreferenceConfig
from rl.data.batches import batch_of, batch_of_pairs
from rl.data.examples import Examples
from rl.data.jsonl import Source
from rl.data.preferences import Labelled, Pair, read_labelled, read_preferences
from rl.dialects.base import Dialect
from rl.metrics import Metrics
from rl.trainers.dataset import DatasetTrainer
from rl.trainers.life_cycle import MetricCalculator
from rl.types import Batch

Preference = Pair | Labelled


class PreferenceTrainer(DatasetTrainer[PreferenceConfig, Preference]):
    """Trains a policy, or a reward model, on answers that are preferred to others. ::

        trainer = rl.PreferenceTrainer(config, dataset_train=rows)
        state = trainer.train()

    The loss couples sequences that may be in different micro-batches. So a step scores all
    sequences first, derives one coefficient for each, and trains a loss that is linear in their
    log-probs (:mod:`rl.algorithms.sequence_scores`). See :mod:`rl.data.preferences` for rows.
    """

    loss: SequenceLoss

    def read(self, source: Source, dialect: Dialect) -> Examples[Any]:
        read = read_labelled if self.is_unpaired else read_preferences
        return read(source, dialect, self.arguments.task, section="task")

    def key(self, item: Preference) -> bytes:
        if isinstance(item, Labelled):
            return item.example.tokens.tobytes()
        return item.chosen.tokens[: item.prompt_tokens].tobytes()

    @property
    def data(self) -> DatasetConfig:
        return self.arguments.task

    def configure_functions(self) -> None:
        self.loss = self.arguments.loss.build()

    @property
    def is_unpaired(self) -> bool:
        """Whether examples are single answers with a label."""
        return isinstance(self.arguments.loss, KTOLoss.Config)

    async def restore(self, state: dict[str, Any]) -> None:
        if self.session.has("reference"):
            await self.session.init_model("reference")

    async def train_step(self) -> bool:
        if self.leaving:
            return False
        batch, labels = self.batch_of(self.next_examples())
        weights, measured = await self.compare(batch, labels)
        learned = with_coefficients(batch, weights)
        await self.session.forward_backward(learned, LinearLoss.Config(head=self.loss.head))
        metrics = await self.session.optim_step(denominator=self.loss.count(labels)) | measured
        self.step += 1
        self.report.step(self.row() | dict(metrics), [metrics], tokens=len(learned.tokens))
        return True

    def batch_of(self, items: list[Preference]) -> tuple[Batch, Labels]:
        """Return the sequences of ``items`` with the weights of their scores, and their labels."""
        if self.is_unpaired:
            labelled = [item for item in items if isinstance(item, Labelled)]
            batch = batch_of([item.example for item in labelled])
            longest = max(int(batch.lengths.max()), self.arguments.task.max_tokens)
            desirable = torch.tensor([item.label for item in labelled])
            batch = with_mismatched(batch, max_tokens=longest)
            return score_batch(batch, self.loss), Labels.unpaired(desirable)
        pairs = [item for item in items if isinstance(item, Pair)]
        return score_batch(batch_of_pairs(pairs), self.loss), Labels.pairs(len(pairs))

    async def compare(self, batch: Batch, labels: Labels) -> tuple[torch.Tensor, Metrics]:
        """Return the coefficients of the sequences that are trained, and metrics."""
        roles = ["trainer", "reference"] if self.loss.needs_reference else ["trainer"]
        outputs = await asyncio.gather(*(self.session.forward(batch, role=role) for role in roles))
        scores, *reference = (sequence_scores(batch, each[self.loss.head]) for each in outputs)
        prior = reference[0] if reference else None
        weights, _, metrics = coefficients(self.loss, scores, prior, labels)
        return weights[: len(batch) // 2] if self.is_unpaired else weights, metrics

    async def export(self, path: Path) -> bool:
        if self.loss.head == "values":
            self.progress.note(f"not exported: set roles.NAME.checkpoint to {self.newest}")
            return False
        return await super().export(path)

    @property
    def newest(self) -> Path:
        """Newest complete checkpoint, which another run loads as a reward model or a critic."""
        return self.checkpoints.path(max(self.checkpoints.complete(), default=0))

    async def scores(self, metric_calculator: MetricCalculator | None = None) -> dict[str, float]:
        """Return the loss and its metrics on ``dataset_eval``, named ``eval/…``.

        ``metric_calculator`` gets the metrics of each batch.
        """
        parts = []
        for items in self.chunks(self.dataset_eval):
            if len(items) > 1 or not self.is_unpaired:  # a baseline needs two
                parts.append((await self.compare(*self.batch_of(items)))[1])
        metrics = dict(Metrics.merged(parts))
        metrics["loss"] = metrics.pop("loss/mean", 0.0)
        if not parts:
            return {}
        if metric_calculator is not None:
            metrics |= metric_calculator(parts)
        return {f"eval/{name}": value for name, value in metrics.items()}
