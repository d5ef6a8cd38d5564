"""Checkpoints of a trainer rank: DCP through torchtitan's manager for resuming, Hugging Face for
the world.
"""

import dataclasses
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.checkpointer.base import LR_SCHEDULER, MODEL, OPTIMIZER, TRAIN_STATE
from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.components.checkpointer.utils import canonical_fqn

from rl.compat.torch_internals import persistent_buffers
from rl.disk import replace_folder
from rl.errors import RunError
from rl.model.shape import ModelConfig, shape_of
from rl.platform import device_type
from rl.step_folders import StepFolders
from rl.training.all_ranks import failures_as_run_error, on_first_rank
from rl.training.engine import TrainingEngine
from rl.training.hugging_face import HuggingFaceFolders
from rl.training.hugging_face_names import Shapes
from rl.training.model import is_adapter
from rl.training.safe_reading import load, read_metadata


class Checkpointer:
    """Saves to and loads from ``folder``/``config.folder``/step-N; all ranks call each method
    alike.

    With ``async_mode`` other than ``disabled``, ``save`` returns while the values of that moment
    are still being written; call ``wait_for_staging`` before the next optimizer step. A save that
    fails is a RunError of ``save`` itself, else of the next ``save``, ``load`` or ``close``.
    """

    def __init__(self, engine: TrainingEngine, model: ModelConfig, *, folder: str):
        config = engine.config.checkpoint
        self._engine = engine
        self._config = config
        self._hf_path = model.hf_path
        self._folders = StepFolders(Path(folder) / config.folder)
        self._hugging_face = HuggingFaceFolders(engine, shape_of(model), model.hf_path)
        self._state = _TrainState(engine)
        self._saving = 0
        self.ignored: list[str] = []
        """Names of the incomplete checkpoints that ``load`` found, such as "checkpoints/step-12".
        """
        self.loaded: Path | None = None
        """Folder of the checkpoint whose ``run_state`` the last ``load`` returned; None without
        one."""
        self._manager = _Manager(
            # The controller says when; and the manager would count and delete checkpoints that are
            # not complete.
            dataclasses.replace(config, enable=True, interval=1, keep_latest_k=0),
            dataloader=None,
            model_parts=[],  # its wrapper of the model gathers fused weights and keeps the copies
            optimizers=engine.optimizers,
            lr_schedulers=engine.schedule,
            states={TRAIN_STATE: self._state},
            sd_adapter=None,
            base_folder=folder,
        )
        self._manager.states[MODEL] = _Weights(engine.model)

    def save(self, step: int, run_state: dict[str, Any]) -> None:
        """Write step-``step``; ``run_state`` is JSON-able and comes back from ``load``."""
        if self._config.load_only:
            return
        self._engine.require_resident("save", "model", "optimizer")
        self._finish_saving()
        self._state.run_state = run_state
        self._saving = step
        on_first_rank(f"checkpoint {step}", lambda: self._folders.make(step))
        with failures_as_run_error(f"checkpoint {step}"):
            self._manager.save(step)
        if self._manager.save_future is None:
            self._complete()

    def wait_for_staging(self) -> None:
        """Return when the weights may change without changing the checkpoint under way."""
        self._manager.maybe_wait_for_staging()

    def load(self, step: int = -1) -> dict[str, Any]:
        """Load checkpoint ``step``, or the newest complete one; where there is none, what the
        config starts from.

        To ask for a step goes back to it, and for 0 to the start: what is newer is deleted, to be
        written again.

        Returns the ``run_state`` of the checkpoint, empty if none was loaded. Raises RunError for a
        checkpoint that is damaged, of another model or not there.
        """
        self._engine.require_resident("load", "model", "optimizer")
        self._finish_saving()
        self._state.run_state = {}
        self.loaded = None
        found, self.ignored = on_first_rank("looking for checkpoints", lambda: self._find(step))
        if found is not None:
            self.loaded = self._folders.path(found)
            advice = (
                f"; if it is damaged, deleting {self.loaded} goes back to the checkpoint before it"
            )
            self._load(
                self.loaded, found, what=f"loading {self._folders.name(found)}", advice=advice
            )
        elif (path := self._config.initial_load_path) and not self._config.initial_load_in_hf:
            self._load(Path(path), -1, what=f"loading {path}")
            self.loaded = None if self._config.initial_load_model_only else Path(path)
        elif source := path or self._hf_path:
            self._hugging_face.load(source)
        self._engine.weights_loaded()
        return self._state.run_state

    def save_weights(self, folder: Path) -> None:
        """Write the parameters alone; ``folder`` appears when it is whole."""
        self._engine.require_resident("save_weights", "model")
        partial = folder.with_name(f"{folder.name}.partial")
        on_first_rank(f"saving {folder}", lambda: shutil.rmtree(partial, ignore_errors=True))
        with failures_as_run_error(f"saving {folder}"):
            dcp.save(self._manager.states[MODEL].state_dict(), checkpoint_id=partial)
        on_first_rank(f"saving {folder}", lambda: replace_folder(folder, partial))

    def load_weights(self, folder: Path, version: int | None = None) -> None:
        """Take the parameters that ``save_weights`` of any layout wrote; of ``version``, if given.

        Raises RunError where there are none.
        """
        self._engine.require_resident("load_weights", "model")
        on_first_rank(f"loading {folder}", lambda: read_metadata(folder))
        with failures_as_run_error(f"loading {folder}"):
            load(self._manager.states[MODEL].state_dict(), folder)
        if version is not None:
            self._engine.version = version
        self._engine.weights_loaded()

    def export_hf(self, folder: str) -> None:
        """Write safetensors and config.json that transformers loads, in the dtype the model started
        from.

        The checkpoint under way is complete when this returns, so that no later failure of the run
        loses it.
        """
        self._engine.require_resident("export_hf", "model")
        self._hugging_face.export(folder)
        self._finish_saving()

    def close(self) -> None:
        """Wait for the save under way and stop the manager's threads."""
        try:
            self._finish_saving()
        finally:
            self._manager.close()

    def _finish_saving(self) -> None:
        """Wait for the save under way; then what it replaces can go."""
        if self._manager.save_future is None:
            return
        try:
            with failures_as_run_error(f"checkpoint {self._saving}"):
                self._manager.maybe_wait_for_saving()
        finally:
            self._manager.save_future = None  # a failure is told once
        self._complete()

    def _complete(self) -> None:
        """Delete the checkpoints that the one just written replaces, once its files are on disk."""
        on_first_rank(f"checkpoint {self._saving}", lambda: self._folders.sync(self._saving))
        on_first_rank(
            "deleting old checkpoints", lambda: self._folders.purge(self._config.keep_latest_k)
        )

    def _find(self, step: int) -> tuple[int | None, list[str]]:
        """(the step to load, names of what is incomplete)."""
        complete = self._folders.complete()
        if step not in (-1, 0, *complete):
            raise RunError(
                f"there is no complete checkpoint {self._folders.path(step)}; there are {complete}"
            )
        if step != -1:
            self._folders.forget_after(step)
        found = max(complete, default=None) if step == -1 else step or None
        return found, [self._folders.name(step) for step in self._folders.incomplete()]

    def _load(self, path: Path, step: int, *, what: str, advice: str = "") -> None:
        """Have the manager load ``step``, which lies at ``path``, once it is known to be of this
        model.
        """
        weights = self._manager.states[MODEL].state_dict()
        model_only = step == -1 and self._config.initial_load_model_only
        saved = on_first_rank(what, lambda: _saved_shapes(path), advice=advice)
        if model_only and not _has_adapters(saved):  # a base, for which adapters stay as they are
            weights = {name: tensor for name, tensor in weights.items() if not is_adapter(name)}
        _check_model(path, saved, {name: tuple(tensor.shape) for name, tensor in weights.items()})
        with failures_as_run_error(what, advice=advice):
            if model_only:
                load(weights, path)
            else:
                self._manager.load(step)


class _Manager(CheckpointManager):
    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Load without torchtitan's unpickling; what is in Hugging Face's format never
        comes here.
        """
        assert not from_hf
        load(state_dict, Path(checkpoint_id))


class _Weights(Stateful):
    """The live parameters, tied ones once, and persistent buffers, by torchtitan's names: no hook,
    no gather.
    """

    def __init__(self, model: nn.Module):
        self._model = model

    def state_dict(self) -> dict[str, torch.Tensor]:
        named = [*self._model.named_parameters(), *persistent_buffers(self._model)]
        return {canonical_fqn(name): tensor.detach() for name, tensor in named}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing: DCP has read into the parameters themselves."""


class _TrainState(Stateful):
    """State besides weights and optimizer: version, counts, random numbers, and the controller's
    own state.

    It is written in the same DCP checkpoint, so that both are complete or neither is. All ranks
    draw the same random numbers, so that one state is every rank's, in any layout.
    """

    def __init__(self, engine: TrainingEngine):
        self._engine = engine
        self.run_state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {
            "version": self._engine.version,
            "skipped_steps": self._engine.skipped_steps,
            "skipped_in_a_row": self._engine.skipped_in_a_row,
            "run_state": json.dumps(self.run_state),
            "rng": json.dumps(_rng_states()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._engine.version = state["version"]
        self._engine.skipped_steps = state["skipped_steps"]
        self._engine.skipped_in_a_row = state["skipped_in_a_row"]
        self.run_state = json.loads(state["run_state"])
        _set_rng_states(json.loads(state["rng"]))


def _rng_states() -> dict[str, str]:
    """State of torch's generators in hex, by device."""
    states = {"cpu": torch.get_rng_state()}
    if device_type() == "cuda":
        states["cuda"] = torch.cuda.get_rng_state()
    return {device: state.numpy().tobytes().hex() for device, state in states.items()}


def _set_rng_states(states: dict[str, str]) -> None:
    for device, text in states.items():
        state = torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
        if device == "cpu":
            torch.set_rng_state(state)
        elif device_type() == "cuda":
            torch.cuda.set_rng_state(state)


def _saved_shapes(path: Path) -> Shapes:
    """The weights of a checkpoint."""
    entries = read_metadata(path).state_dict_metadata
    return {
        name: tuple(entry.size)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
        and name.partition(".")[0] not in (OPTIMIZER, LR_SCHEDULER)
    }


def _has_adapters(names: Iterable[str]) -> bool:
    return any(map(is_adapter, names))


def _check_model(path: Path, saved: Shapes, ours: Shapes) -> None:
    """Raise RunError if the ``saved`` weights are not named and sized as ``ours``; DCP ignores
    surplus ones.
    """
    if _has_adapters(ours) and not _has_adapters(saved):
        raise RunError(
            f"{path} was saved without trainer.lora; give new adapters a base, as "
            "trainer.checkpoint.initial_load_path with initial_load_model_only=True"
        )
    if _has_adapters(saved) and not _has_adapters(ours):
        raise RunError(
            f"{path} was saved with trainer.lora; load it with that, or start from the run's export"
        )
    fused, fuse = (any(".wqkv." in name for name in names) for names in (saved, ours))
    if fused != fuse:
        raise RunError(
            f"{path} was saved with model.fuse_qkv={fused}; load it with that, not with {fuse}"
        )
    differing = [name for name in {**ours, **saved} if saved.get(name) != ours.get(name)]
    if differing:
        name = differing[0]
        found, own = ([*shapes[name]] if name in shapes else "absent" for shapes in (saved, ours))
        raise RunError(
            f"{path} is of another model: {name} is {found} in the checkpoint, {own} in this run"
        )
