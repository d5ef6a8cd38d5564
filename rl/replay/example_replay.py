"""Recorded steps of a run on given examples, trained again on its data set."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl.config import DatasetRunConfig, PreferenceConfig
from rl.errors import require
from rl.metrics import Metrics
from rl.observe.record import rows_of
from rl.observe.rollout_files import Chunk
from rl.replay.replay import Replay
from rl.session.session import Session
from rl.session.session_config import SessionConfig
from rl.trainers.dataset import DatasetTrainer
from rl.trainers.preference import SCORES, PreferenceTrainer
from rl.trainers.report import Report
from rl.trainers.trainer import trainer_of


class ReplayReport(Report):
    """Report that keeps the metrics of the last step, and records nothing."""

    def __init__(self) -> None:
        self.row: dict[str, float] = {}

    def step(self, row: dict[str, float], updates: Sequence[Metrics], *, tokens: int) -> None:
        self.row = row


class ExampleReplay(Replay[DatasetRunConfig]):
    """Trains steps again with the trainer of the run, on the examples in the order of the seed."""

    def __init__(self, config: DatasetRunConfig, run: Path, *, last: int, failed: bool = False):
        super().__init__(config, run, last=last, failed=failed)
        trainer = trainer_of(config)
        assert isinstance(trainer, DatasetTrainer), "other configs are not those of data sets"
        self._trainer = trainer
        cached = isinstance(config, PreferenceConfig) and config.reference.scores == "cached"
        self._has_scores = cached and (run / SCORES).exists()
        """Whether the run folder has the scores of the reference."""

    def readable_steps(self) -> Sequence[int]:
        return [row["step"] for row, _ in rows_of(self.run / "metrics.jsonl")]

    def missing(self, step: int) -> str:
        return f"the run has not reached step {step}"

    def read(self, step: int) -> list[Chunk]:
        return []

    @property
    def session_config(self) -> SessionConfig:
        config = super().session_config
        steps = self._trainer.total_steps * self.config.updates_per_step  # that epochs may set
        roles = {} if self._has_scores else config.roles
        return replace(config, roles=roles, optimizer_steps=steps)

    def link(self, folder: Path) -> None:
        super().link(folder)
        if self._has_scores:
            (folder / SCORES).parent.mkdir(parents=True)
            (folder / SCORES).symlink_to(self.run / SCORES)

    async def restore(self, session: Session, state: dict[str, Any]) -> None:
        trainer = self._trainer
        trainer.run.report = self._report = ReplayReport()
        trainer.run.attach(session)
        cache = trainer.cache if isinstance(trainer, PreferenceTrainer) else None
        require(
            cache is None or cache.is_filled,
            f"{self.run / SCORES} does not have the reference's scores of these examples; add "
            "--reference.scores computed",
        )
        await trainer.restore(state)

    async def take_step(
        self, session: Session, number: int, recorded: list[Chunk]
    ) -> tuple[dict[str, float], Sequence[Chunk]]:
        self._trainer.step = number
        await self._trainer.train_step()
        return self._report.row, []
