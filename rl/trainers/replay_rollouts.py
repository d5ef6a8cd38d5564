"""Recorded steps of an RL run, trained again on their rollouts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl.config import RLConfig
from rl.errors import require
from rl.observe.rollouts import Chunk, RolloutFolder, read_rollouts
from rl.session.session import Session
from rl.step_folders import StepFolders
from rl.trainers.companions import Companions
from rl.trainers.replay import Replay, link_tree
from rl.trainers.step import Step


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

    def recorded_steps(self) -> Sequence[int]:
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
        self._companions = Companions(config, session, session.folder / "reference", folders)
        await self._companions.load(self.first, state.get("companions", {}))

    async def take_step(
        self, session: Session, number: int, recorded: list[Chunk]
    ) -> tuple[dict[str, float], Sequence[Chunk]]:
        step = Step(self._algorithm, session, number)
        for chunk in recorded:
            await step.train(chunk.rollouts)
        metrics = await step.end()
        await self._companions.refresh(number + 1)
        return metrics, step.chunks
