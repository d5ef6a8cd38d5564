"""Checkpoints on disk: which are complete, and how they are deleted."""

import json
import shutil
from pathlib import Path

from rl.errors import RunError
from rl.host.disk import steps_in, sync_folder

ROLLOUTS = "rollouts.parquet"
"""File of a checkpoint that the controller writes before the trainer writes all other files."""


BEST = "best.json"
"""File beside the checkpoints that lists those which stay."""


class StepFolders:
    """Checkpoints of a run: the folders ``folder``/step-N. A checkpoint is complete once it has
    ``.metadata``, which DCP writes last.

    A deletion removes ``.metadata`` first, so a killed deletion leaves an incomplete checkpoint.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def path(self, step: int) -> Path:
        """Return the folder of checkpoint ``step``, whether it exists or not."""
        return self.folder / f"step-{step}"

    def name(self, step: int) -> str:
        """Return the checkpoint's name for messages: checkpoints/step-N."""
        return f"{self.folder.name}/step-{step}"

    def complete(self) -> list[int]:
        """Return the steps of the complete checkpoints, oldest first."""
        return [step for step in self.steps() if self._is_complete(step)]

    def incomplete(self) -> list[int]:
        """Return the steps of the incomplete checkpoints, oldest first."""
        return [step for step in self.steps() if not self._is_complete(step)]

    def best(self) -> dict[int, float]:
        """Return the steps of the best checkpoints and their values, the best one first."""
        path = self.folder / BEST
        steps = json.loads(path.read_bytes())["steps"] if path.exists() else {}
        return {int(step): value for step, value in steps.items()}

    def make(self, step: int) -> None:
        """Make a folder for checkpoint ``step``, empty except for the controller's file.

        Raises RunError if the folder holds a complete checkpoint, since that would look complete
        while it is written again.
        """
        if self._is_complete(step):
            raise RunError(
                f"{self.name(step)} is there and complete: delete {self.path(step)} to write it "
                "again"
            )
        self.path(step).mkdir(parents=True, exist_ok=True)
        for path in self.path(step).iterdir():
            if path.name != ROLLOUTS:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def sync(self, step: int) -> None:
        """Wait until the names of all files of checkpoint ``step`` are on disk. The content of the
        files is on disk already.
        """
        for folder in (self.path(step), self.folder, self.folder.parent):
            sync_folder(folder)

    def purge(self, keep: int) -> None:
        """Delete all complete checkpoints except for the ``keep`` newest (0: delete no complete
        checkpoint) and of the best ones. Delete incomplete checkpoints that are older than the
        newest complete one.
        """
        complete = self.complete()
        kept = {*complete[-keep:], *self.best()}
        for step in self.steps():
            if step not in kept and complete and step < complete[-1]:
                self._delete(step)

    def forget_after(self, step: int) -> None:
        """Delete all checkpoints newer than ``step``."""
        for newer in self.steps():
            if newer > step:
                self._delete(newer)

    def _delete(self, step: int) -> None:
        metadata = self.path(step) / ".metadata"
        if metadata.exists():
            metadata.unlink()
            sync_folder(self.path(step))
        # a folder that could not be deleted is incomplete: the next purge tries again
        shutil.rmtree(self.path(step), ignore_errors=True)

    def _is_complete(self, step: int) -> bool:
        return (self.path(step) / ".metadata").is_file()

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, complete or not, oldest first."""
        return steps_in(self.folder)
