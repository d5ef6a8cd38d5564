"""Reference policy that runs before the first step alone and leaves its scores in a file."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rl.data.order import epoch_order, step_indices
from rl.errors import RunError
from rl.trainers.reference_scores import ReferenceScores, data_digest, source_digest

if TYPE_CHECKING:
    from rl.trainers.preference import Preference, PreferenceTrainer


SCORES = Path("reference") / "scores.safetensors"
"""File of the scores in a run folder."""


class CachedReference:
    """Scores of the reference for the examples of ``trainer``, computed once.

    An entry of the cache has the scores of both answers of a pair. For unpaired losses, it has the
    scores of an example in a step and of its mismatched sequence, which depends on the batch.

    An entry is computed in the batch that has it first. There it has the same bits as if it were
    computed in the step; in other batches it differs by rounding.
    """

    def __init__(self, trainer: "PreferenceTrainer", path: Path):
        """``path`` is the file of the scores."""
        config = trainer.arguments
        self._trainer = trainer
        self._config = config
        self._session = trainer.session
        self._session.set_aside("reference")
        self._entries = ReferenceScores(
            path,
            data=data_digest(config, trainer.dataset_train, trainer.dataset_eval),
            source=source_digest(config),
            note=print if trainer.run is None else trainer.events.note,
        )
        order = epoch_order(config.seed, 0, len(trainer.dataset_train))
        in_order = {
            "train": [trainer.dataset_train[index] for index in order],
            "eval": trainer.dataset_eval,
        }
        self._places = {
            part: {id(item): place for place, item in enumerate(items)}
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
        trainer.progress.stage("starting the reference")
        async with self._session.using("reference"):
            weights = await self._session.weight_digest("reference")
            with entries.adding(weights):
                for part, count in wanted.items():
                    while (done := entries.count(part)) < count and not trainer.leaving:
                        batch, _ = trainer.batch_of(self._batch_at(part, done))
                        scores = await trainer.scores_of(batch, "reference")
                        if entries.add(part, self._as_entries(scores)[: count - done]):
                            done = entries.count(part)
                            trainer.progress.stage(f"reference, {part}: {done:,} of {count:,}")

    def scores(self, part: str, items: list["Preference"]) -> torch.Tensor:
        """Return the scores of the sequences of ``items``, a batch of ``part``, float64 [n].

        Raises RunError if ``items`` are not those that the cache was made for.
        """
        trainer = self._trainer
        if part == "train" and trainer.is_unpaired:
            first = trainer.examples_seen
            places = [*range(first, first + len(items))]
            is_known = [*map(id, items)] == [*map(id, self._batch_at(part, first))]
        else:
            places = [self._places[part].get(id(item), -1) for item in items]
            is_known = min(places) >= 0
        if not is_known or max(places) >= self._entries.count(part):
            raise RunError(
                "reference.scores='cached' has no scores of some examples of this step, since they "
                "do not come in the order of seed and epoch; set reference.scores to 'computed'"
            )
        entries = self._entries.at(part, places)
        return (entries.T if trainer.is_unpaired else entries).flatten()

    def _as_entries(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores of a batch, [n], as entries, [n / 2, 2]."""
        return scores.view(2, -1).T if self._trainer.is_unpaired else scores.view(-1, 2)

    def _count(self, part: str) -> int:
        """Return the number of entries of ``part`` that the run needs."""
        trainer = self._trainer
        if part == "eval":
            return sum(map(len, trainer.held_out_batches()))
        seen = trainer.total_steps * self._config.examples_per_step
        return seen if trainer.is_unpaired else min(seen, len(trainer.dataset_train))

    def _batch_at(self, part: str, first: int) -> list["Preference"]:
        """Return the examples of the batch whose first entry is ``first``."""
        trainer = self._trainer
        size = self._config.examples_per_step
        number = first // size
        if part == "eval":
            return trainer.held_out_batches()[number]
        indices = step_indices(self._config.seed, number, size, len(trainer.dataset_train))
        return [trainer.dataset_train[index] for index in indices]
