"""Checkpoints of the auxiliary models: critic, reference and the user's own."""

import shutil
from pathlib import Path
from typing import Any

from rl.config import RLConfig
from rl.host.disk import steps_in
from rl.observe.checkpoint_folders import StepFolders
from rl.session.session import Session


class AuxiliaryModels:
    """Loads and saves the models beside the policy with each of its checkpoints.

    A reference is a copy of the initial policy, or of the policy at most
    ``reference.refresh_every`` steps ago. ``folder`` keeps the newest copy, and the copies that
    ``checkpoints`` need.
    """

    def __init__(self, config: RLConfig, session: Session, folder: Path, checkpoints: StepFolders):
        self._frozen = [*config.roles]
        self._refresh_every = config.reference.refresh_every
        self._session = session
        self._folder = folder
        self._checkpoints = checkpoints
        self._reference = 0  # step of the policy that the reference copies

    async def load(self, step: int, state: dict[str, Any]) -> None:
        """Load all models as of ``step``. ``state`` is that of the checkpoint, with the result of
        ``to_dict`` as ``auxiliary``.
        """
        auxiliary = state.get("auxiliary", state.get("companions", {}))  # an older name
        for role in self._frozen:
            await self._session.init_model(role)
        if self._session.has("critic"):
            await self._session.load(step, role="critic")
        if not self._session.has("reference"):
            return
        self._reference = copied = auxiliary.get("reference", 0)
        newer = [self._path(saved) for saved in self._saved() if saved > copied]
        for folder in (*newer, *self._folder.glob("policy-*.partial")):
            shutil.rmtree(folder)  # of steps that are taken again
        if copied:
            await self._session.load_weights(self._path(copied), role="reference")
        else:
            await self._session.init_model("reference")

    async def save(self, step: int) -> None:
        """Write checkpoint ``step``. The policy's checkpoint follows and completes the step."""
        if self._session.has("critic"):
            await self._session.save(step, role="critic")

    async def refresh(self, step: int) -> None:
        """Copy the policy to the reference if that is due after ``step``."""
        every = self._refresh_every
        if not (self._session.has("reference") and every and step % every == 0):
            return
        await self._session.copy_weights("trainer", "reference", self._path(step))
        self._reference = step
        saved = self._saved()
        kept_for = (*self._checkpoints.steps(), step)
        needed = {
            max((saved_step for saved_step in saved if saved_step <= at), default=0)
            for at in kept_for
        }
        for saved_step in {*saved} - needed:
            shutil.rmtree(self._path(saved_step))

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-able state for a checkpoint: the step whose weights are the reference."""
        return {"reference": self._reference}

    def _path(self, step: int) -> Path:
        return self._folder / f"policy-{step}"

    def _saved(self) -> list[int]:
        """Return the steps of the policies that were references."""
        return steps_in(self._folder, prefix="policy-")
