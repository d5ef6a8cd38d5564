"""Recorded steps of a run, trained again from a checkpoint."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from rl.config import RLConfig, RunConfig
from rl.errors import require
from rl.model.digest import differing
from rl.observe.checkpoint_folders import StepFolders
from rl.observe.record import rows_of
from rl.observe.rollout_files import Chunk, RolloutFolder, read_rollouts
from rl.session.models import StepDigests
from rl.session.session import Session
from rl.session.session_config import SessionConfig
from rl.trainers.auxiliary_models import AuxiliaryModels
from rl.trainers.step import Step

Config = TypeVar("Config", bound=RunConfig)

Digests = dict[str, list[StepDigests]]
"""Digests of the optimizer steps of one step, by role."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """Result of training one step."""

    metrics: dict[str, Any]
    digests: Digests
    chunks: Sequence[Chunk]
    """Rollouts of the step; empty for a step on given examples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStep:
    """Recorded step that was trained again."""

    step: int
    recorded: TrainedStep
    again: TrainedStep

    @property
    def difference(self) -> str:
        """Text that names the first difference in bits from the recorded step; empty if gradient
        and weights are equal.
        """
        for role, updates in self.recorded.digests.items():
            again = self.again.digests.get(role, [])
            if len(updates) != len(again):
                return f"{role}: {len(again)} optimizer steps, recorded are {len(updates)}"
            for number, (before, after) in enumerate(zip(updates, again, strict=True), start=1):
                for part in ("gradient", "weights"):
                    if names := differing(before[part], after[part]):
                        which = f"update {number} of {len(updates)}, {role}, {part}"
                        return f"{which}: {listed(names)}{self._first_token}"
        return ""

    @property
    def _first_token(self) -> str:
        """Clause that names the first token whose log-prob differs from the recorded one."""
        for chunk, again in zip(self.recorded.chunks, self.again.chunks, strict=True):
            before = chunk.columns.get("trainer_logprobs")
            after = again.columns["trainer_logprobs"]
            if before is not None and not np.array_equal(before, after):
                return f"; {_place(chunk, int(np.flatnonzero(before != after)[0]))}"
        return ""

    @property
    def logprob_change(self) -> float:
        """Largest change of a token's log-prob under the trainer, nats; 0 without rollouts."""
        changes = (
            np.abs(again.columns["trainer_logprobs"] - before.columns["trainer_logprobs"])
            for before, again in zip(self.recorded.chunks, self.again.chunks, strict=True)
        )
        return max((float(change.max(initial=0.0)) for change in changes), default=0.0)


def listed(names: list[str]) -> str:
    """Return the first of ``names``, and how many follow."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more}"


def _place(chunk: Chunk, index: int) -> str:
    """Return text that names the token of this index among all tokens of ``chunk``."""
    for rollout in chunk.rollouts:
        for number, sequence in enumerate(rollout.sequences):
            if index < len(sequence):
                return (
                    f"the first token with another log-prob is token {index} of sequence {number} "
                    f"of prompt {rollout.prompt.prompt_id}, sample {rollout.sample}"
                )
            index -= len(sequence)
    raise IndexError(index)


class Replay(ABC, Generic[Config]):
    """Trains recorded steps of the run in ``run`` again, without generators. ::

        replay = RolloutReplay(config, run, last=160)
        replay.link(folder)                       # the checkpoint, for the session's folder
        async with Session(replay.session_config, folder=folder) as session:
            await replay.load(session)
            async for replayed in replay.steps(session): ...

    ``config`` is the config of the run, or another one for the same data. The run folder is only
    read. A subclass knows what a step is trained on.
    """

    def __init__(self, config: Config, run: Path, *, last: int, failed: bool = False):
        """Find the newest checkpoint before step ``last``.

        If ``failed``, ``last`` is a step that failed, which ``fail_again`` takes. Raises
        ConfigError, which names the step, if a step after the checkpoint was not recorded.
        """
        self.config = config
        self.run = run
        self.failed = failed
        self.last = last - 1 if failed else last
        """Last step that is compared with its record."""
        self._folders = StepFolders(run / config.trainer.checkpoint.folder)
        self.first = max([step for step in self._folders.complete() if step < last], default=0)
        """Step of the checkpoint that the replay begins from; 0 is the start of the run."""
        readable = self.readable_steps()
        missing = [step for step in self.recorded if step not in readable]
        asked = "--failed" if failed else f"--step {last}"
        first = missing[0] if missing else 0
        require(not missing, f"{asked}: {self.missing(first)}")

    @property
    def recorded(self) -> range:
        """Steps that are trained again and compared with their record."""
        return range(self.first + 1, self.last + 1)

    @property
    def begins(self) -> str:
        """Text that names the checkpoint that the replay begins from."""
        return f"checkpoint {self.first}" if self.first else "the start of the run"

    @abstractmethod
    def readable_steps(self) -> Sequence[int]:
        """Return the steps whose data can be read."""

    @abstractmethod
    def missing(self, step: int) -> str:
        """Return text that says why ``step`` cannot be trained again, and what to set."""

    @abstractmethod
    def read(self, step: int) -> list[Chunk]:
        """Return the rollouts that ``step`` was trained on; empty without rollouts."""

    @abstractmethod
    async def restore(self, session: Session, state: dict[str, Any]) -> None:
        """Go back to ``state`` of the loaded checkpoint."""

    @abstractmethod
    async def take_step(
        self, session: Session, number: int, recorded: list[Chunk]
    ) -> tuple[dict[str, float], Sequence[Chunk]]:
        """Train the step after ``number`` steps; return its metrics, and its rollouts with the
        values of their tokens.
        """

    @property
    def session_config(self) -> SessionConfig:
        """Session with the models of the run, without generators, that saves nothing."""
        config = self.config.session()
        assert config.trainer is not None, "a run has a trainer"
        checkpoint = replace(config.trainer.checkpoint, load_only=True)
        trainer = replace(config.trainer, checkpoint=checkpoint)
        return replace(config, trainer=trainer, generator=None, digests=True)

    def link(self, folder: Path) -> None:
        """Make links in ``folder`` to the files of the checkpoint, so that the session of the
        replay changes none of them.
        """
        for name in {self._folders.folder.name, "critic"}:
            link_tree(self.run / name / f"step-{self.first}", folder / name / f"step-{self.first}")

    def require_digests(self) -> None:
        """Raise ConfigError, which names the step, unless all steps have recorded digests."""
        digests = self._rows("digests.jsonl")
        missing = [step for step in self.recorded if step not in digests]
        require(
            not missing,
            f"{self.run / 'digests.jsonl'} has no digests of step {missing[0] if missing else ''}"
            "; they are recorded if record.digests is on",
        )

    async def load(self, session: Session) -> None:
        """Load the checkpoint in ``session``."""
        state, _ = await session.load(self.first)
        await self.restore(session, state)

    async def difference_of_checkpoint(self, session: Session) -> str:
        """Return text that names the first parameter of the loaded checkpoint whose digest differs
        from the one that was recorded after its step; empty if all are equal.
        """
        updates = self._rows("digests.jsonl").get(self.first, {}).get("trainer", [])
        names = (
            differing(updates[-1]["weights"], await session.trained_digests()) if updates else []
        )
        return f"checkpoint {self.first}, weights: {listed(names)}" if names else ""

    async def steps(self, session: Session) -> AsyncGenerator[ReplayedStep]:
        """Train the recorded steps after the loaded checkpoint again, in order; yield each."""
        metrics = self._rows("metrics.jsonl")
        digests = self._rows("digests.jsonl")
        for step in self.recorded:
            recorded = self.read(step)
            trained, chunks = await self.take_step(session, step - 1, recorded)
            yield ReplayedStep(
                step=step,
                recorded=TrainedStep(
                    metrics=metrics.get(step, {}), digests=digests.get(step, {}), chunks=recorded
                ),
                again=TrainedStep(metrics=trained, digests=session.take_digests(), chunks=chunks),
            )

    async def fail_again(self, session: Session) -> None:
        """Take the step that failed; raise what it raises."""
        await self.take_step(session, self.last, self.read_failed())

    def read_failed(self) -> list[Chunk]:
        """Return the rollouts with which a step failed; empty without rollouts."""
        return []

    def _rows(self, name: str) -> dict[int, dict[str, Any]]:
        """Return the rows of a file from the checkpoint on, by step, without the step."""
        rows = (row for row, _ in rows_of(self.run / name))
        return {row.pop("step"): row for row in rows if self.first <= row["step"] <= self.last}


def link_tree(source: Path, target: Path) -> None:
    """Make a tree of folders like ``source``, with links to its files."""
    for path in source.rglob("*"):
        if path.is_file():
            link = target / path.relative_to(source)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path.resolve())


class RolloutReplay(Replay[RLConfig]):
    """Trains steps of an RL run again, on the files in ``rollouts/``."""

    def __init__(self, config: RLConfig, run: Path, *, last: int, failed: bool = False):
        self._rollouts = RolloutFolder(run / "rollouts")
        super().__init__(config, run, last=last, failed=failed)
        require(
            not failed or self._rollouts.failed.exists(),
            f"--failed: {self._rollouts.failed} does not exist, which has the rollouts of the "
            "failing step",
        )

    def readable_steps(self) -> Sequence[int]:
        return self._rollouts.steps()

    def missing(self, step: int) -> str:
        return (
            f"the rollouts of step {step} are not in {self._rollouts.folder}, and the replay "
            f"begins at {self.begins}; record.rollouts must be 'all', and record.max_gib large "
            "enough to keep them"
        )

    def read(self, step: int) -> list[Chunk]:
        return read_rollouts(self._rollouts.path(step))

    def read_failed(self) -> list[Chunk]:
        return read_rollouts(self._rollouts.failed)

    def link(self, folder: Path) -> None:
        super().link(folder)
        for copy in self.run.glob("reference/policy-*"):
            link_tree(copy, folder / "reference" / copy.name)

    async def restore(self, session: Session, state: dict[str, Any]) -> None:
        config = self.config
        self._algorithm = config.algorithm.build(run=config)
        self._algorithm.restore(state.get("algorithm", {}))
        folders = StepFolders(session.folder / config.trainer.checkpoint.folder)
        self._auxiliary = AuxiliaryModels(config, session, session.folder / "reference", folders)
        await self._auxiliary.load(self.first, state)

    async def take_step(
        self, session: Session, number: int, recorded: list[Chunk]
    ) -> tuple[dict[str, float], Sequence[Chunk]]:
        step = Step(self._algorithm, session, number)
        for chunk in recorded:
            await step.train(chunk.rollouts)
        metrics = await step.end()
        await self._auxiliary.refresh(number + 1)
        return metrics, step.chunks
