"""Recorded steps of a run, trained again from a checkpoint and their rollouts."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rl.config import RLConfig
from rl.errors import require
from rl.observe.record import rows_of
from rl.observe.rollouts import Chunk, RolloutFolder, read_rollouts
from rl.roles import session_config
from rl.session.config import SessionConfig
from rl.session.models import StepDigests
from rl.session.session import Session
from rl.step_folders import StepFolders
from rl.trainers.companions import Companions
from rl.trainers.step import Step

Digests = dict[str, list[StepDigests]]
"""Digests of the optimizer steps of one step, by role."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Record of one step in a run folder."""

    metrics: dict[str, Any]
    digests: Digests
    chunks: list[Chunk]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Recorded step that was trained again."""

    step: int
    recorded: Recorded
    metrics: dict[str, Any]
    digests: Digests
    chunks: list[Chunk]

    @property
    def difference(self) -> str:
        """Text that names the first difference in bits from the recorded step; empty if gradient
        and weights are equal.
        """
        for role, updates in self.recorded.digests.items():
            again = self.digests.get(role, [])
            if len(updates) != len(again):
                return f"{role}: {len(again)} optimizer steps, recorded are {len(updates)}"
            for number, (before, after) in enumerate(zip(updates, again, strict=True), start=1):
                for part in ("gradient", "weights"):
                    if names := different(before[part], after[part]):
                        which = f"update {number} of {len(updates)}, {role}, {part}"
                        return f"{which}: {listed(names)}{self._first_token}"
        return ""

    @property
    def _first_token(self) -> str:
        """Clause that names the first token whose log-prob differs from the recorded one."""
        for chunk, again in zip(self.recorded.chunks, self.chunks, strict=True):
            before = chunk.columns.get("trainer_logprobs")
            after = again.columns["trainer_logprobs"]
            if before is not None and not np.array_equal(before, after):
                return f"; {_place(chunk, int(np.flatnonzero(before != after)[0]))}"
        return ""

    @property
    def logprob_change(self) -> float:
        """Largest change of a token's log-prob under the trainer, nats."""
        pairs = zip(self.recorded.chunks, self.chunks, strict=True)
        changes = (
            np.abs(again.columns["trainer_logprobs"] - before.columns["trainer_logprobs"])
            for before, again in pairs
        )
        return max(float(each.max(initial=0.0)) for each in changes)


def different(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Return the names of the parameters whose digests differ."""
    names = [*before, *(name for name in after if name not in before)]
    return [name for name in names if before.get(name) != after.get(name)]


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


class Replay:
    """Trains recorded steps of the run in ``run`` again, without generators. ::

        replay = Replay(config, run, last=160)
        replay.link(folder)                       # the checkpoint, for the session's folder
        async with Session(replay.session_config, folder=folder) as session:
            await replay.load(session)
            async for replayed in replay.steps(session): ...

    ``config`` is the config of the run, or another one for the same data. The run folder is only
    read.
    """

    def __init__(self, config: RLConfig, run: Path, *, last: int):
        """Find the newest checkpoint before step ``last``.

        Raises ConfigError, which names the step, if a step after the checkpoint was not recorded.
        """
        self._config = config
        self._run = run
        self._last = last
        self._folders = StepFolders(run / config.trainer.checkpoint.folder)
        complete = [step for step in self._folders.complete() if step < last]
        self.first = max(complete, default=0)
        """Step of the checkpoint that the replay begins from; 0 is the start of the run."""
        self._rollouts = RolloutFolder(run / "rollouts")
        recorded = self._rollouts.steps()
        missing = [step for step in range(self.first + 1, last + 1) if step not in recorded]
        begins = f"checkpoint {self.first}" if self.first else "the start of the run"
        require(
            not missing,
            f"--step {last}: the rollouts of step {missing[0] if missing else ''} are not in "
            f"{self._rollouts.folder}, and the replay begins at {begins}; record.rollouts must be "
            "'all', and record.max_gib large enough to keep them",
        )

    @property
    def session_config(self) -> SessionConfig:
        """Session with the models of the run, without generators, that saves nothing."""
        config = session_config(self._config)
        assert config.trainer is not None, "an RLConfig has a trainer"
        trainer = replace(
            config.trainer, checkpoint=replace(config.trainer.checkpoint, load_only=True)
        )
        return replace(config, trainer=trainer, generator=None, digests=True)

    def link(self, folder: Path) -> None:
        """Make links in ``folder`` to the files of the checkpoint, so that the session of the
        replay changes none of them.
        """
        for name in {self._folders.folder.name, "critic"}:
            _link(self._run / name / f"step-{self.first}", folder / name / f"step-{self.first}")
        for copy in self._run.glob("reference/policy-*"):
            _link(copy, folder / "reference" / copy.name)

    def require_digests(self) -> None:
        """Raise ConfigError, which names the step, unless all steps have recorded digests."""
        recorded = self._rows("digests.jsonl")
        missing = [n for n in range(self.first + 1, self._last + 1) if n not in recorded]
        require(
            not missing,
            f"{self._run / 'digests.jsonl'} has no digests of step {missing[0] if missing else ''}"
            "; they are recorded if record.digests is on",
        )

    async def load(self, session: Session) -> None:
        """Load the checkpoint in ``session``."""
        config = self._config
        state, _ = await session.load(self.first)
        self._algorithm = config.algorithm.build(run=config)
        self._algorithm.restore(state.get("algorithm", {}))
        folder = session.folder / "reference"
        folders = StepFolders(session.folder / config.trainer.checkpoint.folder)
        self._companions = Companions(config, session, folder, folders)
        await self._companions.load(self.first, state.get("companions", {}))

    async def difference_of_checkpoint(self, session: Session) -> str:
        """Return text that names the first parameter of the loaded checkpoint whose digest differs
        from the one that was recorded after its step; empty if all are equal.
        """
        updates = self._rows("digests.jsonl").get(self.first, {}).get("trainer", [])
        names = (
            different(updates[-1]["weights"], await session.trained_digests()) if updates else []
        )
        return f"checkpoint {self.first}, weights: {listed(names)}" if names else ""

    async def steps(self, session: Session) -> AsyncGenerator[Replayed]:
        """Train the steps after the loaded checkpoint again, in order; yield each."""
        metrics = self._rows("metrics.jsonl")
        digests = self._rows("digests.jsonl")
        for number in range(self.first, self._last):
            recorded = read_rollouts(self._rollouts.path(number + 1))
            step = Step(self._algorithm, session, number)
            for chunk in recorded:
                await step.train(chunk.rollouts)
            found = await step.end()
            await self._companions.refresh(number + 1)
            yield Replayed(
                step=number + 1,
                recorded=Recorded(
                    metrics=metrics.get(number + 1, {}),
                    digests=digests.get(number + 1, {}),
                    chunks=recorded,
                ),
                metrics=found,
                digests=session.take_digests(),
                chunks=step.chunks,
            )

    def _rows(self, name: str) -> dict[int, dict[str, Any]]:
        """Return the rows of a file from the checkpoint on, by step, without the step."""
        rows = (row for row, _ in rows_of(self._run / name))
        return {row.pop("step"): row for row in rows if self.first <= row["step"] <= self._last}


def _link(source: Path, target: Path) -> None:
    """Make a tree of folders like ``source``, with links to its files."""
    for path in source.rglob("*"):
        if path.is_file():
            link = target / path.relative_to(source)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path.resolve())
