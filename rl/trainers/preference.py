"""Preference training and reward models: losses over whole sequences."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torchtitan.config import Configurable

from rl.algorithms.sequence_losses import BradleyTerryLoss, KTOLoss, Labels, SequenceLoss
from rl.algorithms.sequence_scores import (
    LinearLoss,
    LossOfPairs,
    coefficients,
    pair_batch,
    score_batch,
    sequence_scores,
    with_coefficients,
    with_mismatched,
)
from rl.config import PreferenceConfig
from rl.data.batches import batch_of, batch_of_pairs
from rl.data.examples import Examples
from rl.data.jsonl import Source
from rl.data.order import epoch_order, step_indices
from rl.data.preferences import Labelled, Pair, read_labelled, read_preferences
from rl.data.stored import Stored
from rl.dialects.dialect import Dialect
from rl.errors import RunError
from rl.metrics import Metrics
from rl.trainers.dataset import DatasetTrainer
from rl.trainers.hooks import MetricCalculator
from rl.trainers.reference_scores import ReferenceScores, data_digest, source_digest
from rl.types import Batch

Preference = Pair | Labelled

SCORES = Path("reference") / "scores.safetensors"
"""File of the scores in a run folder."""


class PreferenceTrainer(DatasetTrainer[PreferenceConfig, Preference]):
    """Trains a policy, or a reward model, on answers that are preferred to others. ::

        trainer = rl.PreferenceTrainer(config, dataset_train=rows)
        state = trainer.train()

    A loss of pairs is computed where both sequences of a pair are in one micro-batch. If a
    micro-batch has no room for two, or if the loss couples more sequences, a step scores all
    sequences first, derives one coefficient for each, and trains a loss that is linear in their
    log-probs (:mod:`rl.algorithms.sequence_scores`). See :mod:`rl.data.preferences` for rows.
    """

    loss: SequenceLoss
    cache: "CachedReference | None"

    def read(self, source: Source, dialect: Dialect) -> Examples[Any]:
        read = read_labelled if self.is_unpaired else read_preferences
        return read(source, dialect, self.arguments.task, section="task")

    def key(self, item: Preference) -> bytes:
        if isinstance(item, Labelled):
            return super().key(item)
        return item.chosen.tokens[: item.prompt_tokens].tobytes()

    def configure_functions(self) -> None:
        self.loss = self.arguments.loss.build()

    @property
    def is_unpaired(self) -> bool:
        """Whether examples are single answers with a label."""
        return isinstance(self.arguments.loss, KTOLoss.Config)

    def assemble(self) -> None:
        super().assemble()
        wanted = self.loss.needs_reference and self.arguments.reference.scores == "cached"
        path = self.session.folder / SCORES
        # without a run folder or a copy of its scores, the session runs the reference
        is_kept = self.run.folder is not None or path.exists()
        self.cache = CachedReference(self, path) if wanted and is_kept else None

    async def restore(self, state: dict[str, Any]) -> None:
        await super().restore(state)
        if self.session.has("reference") and self.cache is None:
            await self.session.init_model("reference")

    async def between_steps(self) -> None:
        if self.cache is not None:
            await self.cache.fill("eval", "train")
        await super().between_steps()

    async def train_step(self) -> bool:
        if self.leaving:
            return False
        items = self.next_examples()
        batch, labels = self.batch_of(items)
        known = self.cache.scores("train", items) if self.cache is not None else None
        with self.run.step_calls():
            if self.arguments.in_one_pass:
                measured = Metrics({})
                learned = pair_batch(batch, labels, await self.reference_of(batch, known))
                loss: Configurable.Config = LossOfPairs.Config(loss=self.arguments.loss)
            else:
                weights, measured = await self.compare(batch, labels, known)
                learned = with_coefficients(batch, weights)
                loss = LinearLoss.Config(head=self.loss.head)
            await self.session.forward_backward(learned, loss)
            metrics = await self.session.optim_step(denominator=self.loss.count(labels)) | measured
        self.step += 1
        self.report.step(self.row() | dict(metrics), [metrics], tokens=len(learned.tokens))
        return True

    async def reference_of(
        self, batch: Batch, known: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Return the scores of the reference, [n], which may be ``known``; None without one."""
        if known is not None or not self.loss.needs_reference:
            return known
        return await self.scores_of(batch, "reference")

    def batch_of(self, items: Sequence[Preference]) -> tuple[Batch, Labels]:
        """Return the sequences of ``items`` with the weights of their scores, and their labels."""
        if self.is_unpaired:
            labelled = [item for item in items if isinstance(item, Labelled)]
            batch = batch_of([item.example for item in labelled])
            longest = max(int(batch.lengths.max()), self.arguments.task.max_tokens)
            desirable = torch.tensor([item.label for item in labelled])
            batch = with_mismatched(batch, max_tokens=longest)
            return score_batch(batch, self.loss), Labels.unpaired(desirable)
        pairs = [item for item in items if isinstance(item, Pair)]
        margins = None  # those of the rows, or that of the loss where a row has none
        if isinstance(self.loss, BradleyTerryLoss) and any(p.margin is not None for p in pairs):
            default = self.loss.config.margin
            margins = torch.tensor([default if p.margin is None else p.margin for p in pairs])
        labels = Labels.pairs(len(pairs), margins)
        return score_batch(batch_of_pairs(pairs), self.loss), labels

    def warnings(self) -> list[str]:
        """Return warnings of the examples, for the start of the run."""
        warnings = super().warnings()
        if not isinstance(self.arguments.loss, BradleyTerryLoss.Config):
            margins = (item.margin for item in self.dataset_train if isinstance(item, Pair))
            if any(margin is not None for margin in margins):
                warnings.append(f"{type(self.loss).__name__} does not read the margins of the rows")
        if isinstance(self.arguments.loss, KTOLoss.Config):
            warnings += kto_imbalance(self.arguments.loss, self.dataset_train)
        return warnings

    async def compare(
        self, batch: Batch, labels: Labels, reference: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Metrics]:
        """Return the coefficients of the sequences that are trained, and metrics.

        ``reference`` are the scores of the reference, [n], if they are known.
        """
        scores, prior = await asyncio.gather(
            self.scores_of(batch, "trainer"), self.reference_of(batch, reference)
        )
        weights, _, metrics = coefficients(self.loss, scores, prior, labels)
        return weights[: len(batch) // 2] if self.is_unpaired else weights, metrics

    async def scores_of(self, batch: Batch, role: str) -> torch.Tensor:
        """Return the scores of the model ``role``, float64 [n]."""
        outputs = await self.session.forward(batch, role=role)
        return sequence_scores(batch, outputs[self.loss.head])

    async def scores(self, metric_calculator: MetricCalculator | None = None) -> dict[str, float]:
        """Return the loss and its metrics on ``dataset_eval``, named ``eval/…``.

        ``metric_calculator`` gets the metrics of each batch.
        """
        parts = []
        if self.cache is not None:
            await self.cache.fill("eval")
        for items in self.held_out_batches():
            known = self.cache.scores("eval", items) if self.cache is not None else None
            parts.append((await self.compare(*self.batch_of(items), known))[1])
        metrics = dict(Metrics.merged(parts))
        metrics["loss"] = metrics.pop("loss/mean", 0.0)
        if not parts:
            return {}
        if metric_calculator is not None:
            metrics |= metric_calculator(parts)
        return {f"eval/{name}": value for name, value in metrics.items()}

    def held_out_batches(self) -> list[Sequence[Preference]]:
        """Return the examples of ``dataset_eval`` in batches; a baseline of KTO needs two."""
        batches = self.chunks(self.dataset_eval)
        return [items for items in batches if len(items) > 1 or not self.is_unpaired]


def kto_imbalance(loss: KTOLoss.Config, items: Sequence[Preference]) -> list[str]:
    """Return a warning if good and bad answers do not weigh about the same, as
    arXiv:2402.01306, section 4.2, asks for.
    """
    labels = [item.label for item in items if isinstance(item, Labelled)]
    good = sum(labels)
    bad = len(labels) - good
    weights = (good * loss.desirable_weight, bad * loss.undesirable_weight)
    if weights[1] and 3 / 4 <= weights[0] / weights[1] <= 4 / 3:
        return []
    ratio = f"loss.undesirable_weight / loss.desirable_weight to {good / bad:.3g}" if bad else ""
    fix = f"set {ratio}" if good and bad else "add answers of the other kind"
    return [f"{good} answers are good and {bad} are bad, which do not weigh the same; {fix}"]


class CachedReference:
    """Scores of the reference for the examples of ``trainer``, computed once.

    An entry of the cache has the scores of both answers of a pair. For unpaired losses, it has the
    scores of an example in a step and of its mismatched sequence, which depends on the batch.

    An entry is computed in the batch that has it first. There it has the same bits as if it were
    computed in the step; in other batches it differs by rounding.
    """

    def __init__(self, trainer: PreferenceTrainer, path: Path):
        """``path`` is the file of the scores."""
        config = trainer.arguments
        self._trainer = trainer
        self._config = config
        self._session = trainer.session
        self._session.aside.add("reference")
        self._entries = ReferenceScores(
            path,
            data=data_digest(config, trainer.dataset_train, trainer.dataset_eval),
            source=source_digest(config),
            note=print if trainer.run.folder is None else trainer.run.events.note,
        )
        train = trainer.dataset_train
        order = epoch_order(config.seed, 0, len(train))
        # a stored item is another object each time, and has a line of its own
        is_stored = Stored in (type(train), type(trainer.dataset_eval))
        self._key: Callable[[Any], int] = (lambda item: item.examples[0].line) if is_stored else id
        in_order = {"train": (train[index] for index in order), "eval": trainer.dataset_eval}
        self._places = {
            part: {self._key(item): place for place, item in enumerate(items)}
            for part, items in in_order.items()
        }

    @property
    def is_filled(self) -> bool:
        """Whether no entry of a step is missing."""
        return self._entries.has({"train": self._count("train")})

    async def fill(self, *parts: str) -> None:
        """Compute the missing entries of ``parts``, unless the run is left before."""
        trainer = self._trainer
        entries = self._entries
        wanted = {part: self._count(part) for part in parts}
        if entries.has(wanted):
            return
        trainer.run.progress.stage("starting the reference")
        async with self._session.using("reference"):
            with entries.adding(await self._session.weight_digest("reference")):
                for part, count in wanted.items():
                    while (done := entries.count(part)) < count and not trainer.leaving:
                        batch, _ = trainer.batch_of(self._batch_at(part, done))
                        scores = await trainer.scores_of(batch, "reference")
                        rows = scores.view(2, -1).T if trainer.is_unpaired else scores.view(-1, 2)
                        if entries.add(part, rows[: count - done]):
                            done = entries.count(part)
                            trainer.run.progress.stage(f"reference, {part}: {done:,} of {count:,}")

    def scores(self, part: str, items: Sequence[Preference]) -> torch.Tensor:
        """Return the scores of the sequences of ``items``, a batch of ``part``, float64 [n].

        Raises RunError if ``items`` are not those that the cache was made for.
        """
        trainer = self._trainer
        if part == "train" and trainer.is_unpaired:
            first = trainer.examples_seen
            places = [*range(first, first + len(items))]
            batch = self._batch_at(part, first)
            is_known = [*map(self._key, items)] == [*map(self._key, batch)]
        else:
            places = [self._places[part].get(self._key(item), -1) for item in items]
            is_known = min(places) >= 0
        if not is_known or max(places) >= self._entries.count(part):
            raise RunError(
                "reference.scores='cached' has no scores of some examples of this step, since they "
                "do not come in the order of seed and epoch; set reference.scores to 'computed'"
            )
        entries = self._entries.at(part, places)
        return (entries.T if trainer.is_unpaired else entries).flatten()

    def _count(self, part: str) -> int:
        """Return the number of entries of ``part`` that the run needs."""
        trainer = self._trainer
        if part == "eval":
            count = len(trainer.dataset_eval)
            return count - (trainer.is_unpaired and count % self._config.examples_per_step == 1)
        seen = trainer.total_steps * self._config.examples_per_step
        return seen if trainer.is_unpaired else min(seen, len(trainer.dataset_train))

    def _batch_at(self, part: str, first: int) -> Sequence[Preference]:
        """Return the examples of the batch whose first entry is ``first``."""
        trainer = self._trainer
        size = self._config.examples_per_step
        number = first // size
        if part == "eval":
            return trainer.held_out_batches()[number]
        indices = step_indices(self._config.seed, number, size, len(trainer.dataset_train))
        return [trainer.dataset_train[index] for index in indices]
