"""Checkpoints of a trainer rank: DCP through torchtitan's manager, and exports to Hugging Face."""

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
from rl.errors import RunError
from rl.host.disk import replace_folder
from rl.host.platform import device_type
from rl.model.shape import ModelConfig, shape_of
from rl.model.updates import Update
from rl.observe.checkpoint_folders import StepFolders
from rl.training.adapters import ADAPTER, FRESH
from rl.training.all_ranks import failures_as_run_error, on_first_rank
from rl.training.engine import TrainingEngine
from rl.training.hugging_face_folders import HuggingFaceFolders
from rl.training.hugging_face_names import Shapes
from rl.training.safe_reading import load, read_metadata
from rl.training.sharded_model import is_adapter
from rl.training.trainer_config import AdapterConfig


class Checkpointer:
    """Saving and loading of ``folder``/``config.folder``/step-N. All ranks must call each method
    together.

    With ``async_mode`` other than ``disabled``, ``save`` returns before the values are written;
    call ``wait_for_staging`` before the next optimizer step. If a save fails, ``save`` or
    the next ``save``, ``load``, ``export_hf`` or ``close`` raises RunError.
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
        """Folder of the checkpoint whose ``run_state`` the last ``load`` returned, if any."""
        self._manager = _Manager(
            # The controller decides when to save. The manager would count and delete incomplete
            # checkpoints.
            dataclasses.replace(config, enable=True, interval=1, keep_latest_k=0),
            dataloader=None,
            model_parts=[],  # the manager's wrapper would gather fused weights and keep copies
            optimizers=engine.optimizers,
            lr_schedulers=engine.schedule,
            states={TRAIN_STATE: self._state},
            sd_adapter=None,
            base_folder=folder,
        )
        self._weights = self._manager.states[MODEL] = _Weights(engine.model)
        engine.adapters.storage = self

    def save(self, step: int, run_state: dict[str, Any]) -> None:
        """Write checkpoint ``step``, unless the config is ``load_only``.

        A later ``load`` returns ``run_state``, which must be JSON-able.
        """
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
        """Wait until the weights may change without changing the checkpoint being written."""
        self._manager.maybe_wait_for_staging()

    def load(self, step: int = -1) -> dict[str, Any]:
        """Load checkpoint ``step``, or with -1 the newest complete one. Without a checkpoint, load
        the weights that the config starts from.

        A ``step`` other than -1 goes back to it (0: the start) and deletes newer checkpoints.

        Returns the ``run_state`` of the checkpoint, empty if none was loaded. Raises RunError if
        the checkpoint is missing, damaged or of another model.
        """
        self._engine.require_resident("load", "model", "optimizer")
        self._finish_saving()
        self._state.run_state = {}
        self.loaded = None
        saved, self.ignored = on_first_rank("looking for checkpoints", lambda: self._find(step))
        if saved is not None:
            self.loaded = self._folders.path(saved)
            advice = f"; if it is damaged, deleting {self.loaded} goes back to the one before it"
            self._load(self.loaded, saved, self._folders.name(saved), advice)
        elif (path := self._config.initial_load_path) and not self._config.initial_load_in_hf:
            self._load(Path(path), -1, path)
            self.loaded = None if self._config.initial_load_model_only else Path(path)
        elif source := path or self._hf_path:
            self._hugging_face.load(source)
        self._engine.weights_loaded()
        return self._state.run_state

    def save_weights(self, folder: Path) -> None:
        """Write only the parameters; ``folder`` appears when it is complete."""
        self._engine.require_resident("save_weights", "model")
        self._write(folder, self._weights.state_dict())

    def load_weights(self, folder: Path, version: int | None = None) -> None:
        """Load the parameters that ``save_weights`` of any layout wrote, and set the engine's
        ``version`` if it is given. Raises RunError if ``folder`` has none.
        """
        self._engine.require_resident("load_weights", "model")
        on_first_rank(f"loading {folder}", lambda: read_metadata(folder))
        self._read(folder, self._weights.state_dict())
        if version is not None:
            self._engine.version = version
        self._engine.weights_loaded()

    def save_snapshot(self, folder: Path) -> None:
        """Write only the adapter that the model has; ``folder`` must not exist."""
        if on_first_rank(f"saving {folder}", folder.exists):
            raise RunError(f"{folder} exists, and a snapshot does not change; name another folder")
        self._write(folder, self._engine.adapters.state)

    def load_snapshot(self, folder: Path) -> AdapterConfig:
        """Give the model the adapter of a snapshot or a state; return the config of that."""
        state = self._engine.adapters.state
        self._parts(folder, state)
        self._read(folder, state)
        return AdapterConfig(**state[ADAPTER])

    def save_state(self, folder: Path) -> None:
        """Write weights, moments, counts and schedule, without gradients. The weights are those of
        the adapter in the model, or all of the policy. ``folder`` is replaced when the new one is
        complete.
        """
        self._engine.require_resident("save_state", "model", "optimizer")
        state = self._trained() | self._progress()
        if not any(optimizer.state for optimizer in self._engine.optimizers):
            del state[OPTIMIZER]  # torchtitan would take a step to have moments
        self._write(folder, state)

    def load_state(self, folder: Path, optimizer: bool) -> int:
        """Load the state that ``save_state`` of any layout wrote, of this adapter or of the policy;
        discard gradients; return the version. Without ``optimizer``, load weights alone, and let
        the optimizer begin anew.

        Raises RunError if ``folder`` holds something else. If its values are damaged, the weights
        may be mixed then.
        """
        engine = self._engine
        engine.require_resident("load_state", "model", "optimizer")
        state = self._trained()
        parts = self._parts(folder, state)
        if optimizer and TRAIN_STATE not in parts:
            raise RunError(f"{folder} has weights alone; load it with optimizer=False")
        if ADAPTER in state:
            config = {ADAPTER: dict(state[ADAPTER])}
            self._read(folder, config)
            if config[ADAPTER] | {"seed": 0} != state[ADAPTER] | {"seed": 0}:
                raise RunError(f"{folder} has the adapter {config[ADAPTER]}, not {state[ADAPTER]}")
        engine.adapters.start_anew()
        progress = self._progress() if optimizer else {}
        self._read(folder, state | {name: progress[name] for name in progress if name in parts})
        engine.optimizer_loaded()
        engine.weights_loaded()
        return engine.version

    def _trained(self) -> dict[str, Any]:
        """Return what a state has of the adapter in the model, or of the policy."""
        adapters = self._engine.adapters
        return self._weights.state_dict() if (adapters.current is None) else adapters.state

    def _progress(self) -> dict[str, Any]:
        """Return what a state has besides that."""
        engine = self._engine
        parts = {TRAIN_STATE: self._state, LR_SCHEDULER: engine.schedule}
        return parts | {OPTIMIZER: engine.optimizers}

    def _write(self, folder: Path, state: dict[str, Any]) -> None:
        """Write ``state``. ``folder`` appears, or is replaced, when the new one is complete."""
        what = f"saving {folder}"
        partial = folder.with_name(f"{folder.name}.partial")
        on_first_rank(what, lambda: shutil.rmtree(partial, ignore_errors=True))
        with failures_as_run_error(what):
            dcp.save(state, checkpoint_id=partial)
        on_first_rank(what, lambda: replace_folder(folder, partial))

    def _read(self, folder: Path, state: dict[str, Any]) -> None:
        with failures_as_run_error(f"loading {folder}"):
            load(state, folder)

    def _parts(self, folder: Path, state: dict[str, Any]) -> set[str]:
        """Return the names of the parts of ``folder``. Raises RunError unless it has the weights of
        ``state`` alone, and those of an adapter if these are.
        """
        saved, parts = on_first_rank(f"loading {folder}", lambda: _saved(folder))
        if ADAPTER in state and ADAPTER not in parts:
            raise RunError(f"{folder} holds no adapter")
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items() if name != ADAPTER}
        _check_model(folder, saved, shapes)
        return parts

    def export_hf(self, folder: str, dtype: str = "") -> Update:
        """Write safetensors and config.json for transformers: see
        :meth:`HuggingFaceFolders.export`. Also waits for the checkpoint being written.
        """
        self._engine.require_resident("export_hf", "model")
        update = self._hugging_face.export(folder, dtype)
        self._finish_saving()
        return update

    def close(self) -> None:
        """Wait for the checkpoint being written and stop the manager's threads."""
        try:
            self._finish_saving()
        finally:
            self._manager.close()

    def _finish_saving(self) -> None:
        """Wait for the checkpoint being written, then delete the checkpoints that it replaces."""
        if self._manager.save_future is None:
            return
        try:
            with failures_as_run_error(f"checkpoint {self._saving}"):
                self._manager.maybe_wait_for_saving()
        finally:
            self._manager.save_future = None  # a failure is raised once
        self._complete()

    def _complete(self) -> None:
        """Sync the new checkpoint to disk, then delete the checkpoints that it replaces."""
        on_first_rank(f"checkpoint {self._saving}", lambda: self._folders.sync(self._saving))
        keep = self._config.keep_latest_k
        on_first_rank("deleting old checkpoints", lambda: self._folders.purge(keep))

    def _find(self, step: int) -> tuple[int | None, list[str]]:
        """Return the step to load and the names of incomplete checkpoints."""
        complete = self._folders.complete()
        if step not in (-1, 0, *complete):
            path = self._folders.path(step)
            raise RunError(f"there is no complete checkpoint {path}; there are {complete}")
        if step != -1:
            self._folders.forget_after(step)
        newest = max(complete, default=None) if step == -1 else step or None
        return newest, [self._folders.name(step) for step in self._folders.incomplete()]

    def _load(self, path: Path, step: int, name: str, advice: str = "") -> None:
        """Load checkpoint ``step`` from ``path``. Raises RunError if it is of another model."""
        what = f"loading {name}"
        weights = self._weights.state_dict()
        model_only = step == -1 and self._config.initial_load_model_only
        saved, _ = on_first_rank(what, lambda: _saved(path), advice=advice)
        if model_only and not _has_adapters(saved):  # a base model: keep the new adapters
            weights = {name: tensor for name, tensor in weights.items() if not is_adapter(name)}
        _check_model(path, saved, {name: tuple(tensor.shape) for name, tensor in weights.items()})
        with failures_as_run_error(what, advice=advice):
            if model_only:
                load(weights, path)
            else:
                self._manager.load(step)
                self._engine.optimizer_loaded()


class _Manager(CheckpointManager):
    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Load without torchtitan's unpickling."""
        assert not from_hf
        load(state_dict, Path(checkpoint_id))


class _Weights(Stateful):
    """Live parameters and persistent buffers, by torchtitan's names; a tied parameter has one
    entry. Runs no hooks and gathers nothing.
    """

    def __init__(self, model: nn.Module):
        self._model = model

    def state_dict(self) -> dict[str, torch.Tensor]:
        named = [*self._model.named_parameters(), *persistent_buffers(self._model)]
        return {canonical_fqn(name): tensor.detach() for name, tensor in named}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: DCP has already read the values into the parameters."""


class _TrainState(Stateful):
    """State besides weights and optimizer: version, counts, random numbers, and the controller's
    state.

    One DCP checkpoint holds this state and the weights, so that both are complete or neither is.
    All ranks draw the same random numbers, so that one state fits every rank of any layout.
    """

    def __init__(self, engine: TrainingEngine):
        self._engine = engine
        self.run_state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        states = {"cpu": torch.get_rng_state()}
        if device_type() == "cuda":
            states["cuda"] = torch.cuda.get_rng_state()
        rng = {device: state.numpy().tobytes().hex() for device, state in states.items()}
        texts = {"run_state": json.dumps(self.run_state), "rng": json.dumps(rng)}
        return {name: getattr(self._engine, name) for name in FRESH} | texts

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in FRESH:
            setattr(self._engine, name, state[name])
        self.run_state = json.loads(state["run_state"])
        for device, text in json.loads(state["rng"]).items():
            rng = torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
            if device == "cpu":
                torch.set_rng_state(rng)
            elif device_type() == "cuda":
                torch.cuda.set_rng_state(rng)


def _saved(folder: Path) -> tuple[Shapes, set[str]]:
    """Return the shapes of the weights in ``folder``, or in a checkpoint, and the names of the
    parts of the folder.
    """
    entries = read_metadata(folder).state_dict_metadata
    parts = {name: name.partition(".")[0] for name in entries}
    shapes = {
        name: tuple(entry.size)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata) and parts[name] not in (OPTIMIZER, LR_SCHEDULER)
    }
    return shapes, {*parts.values()}


def _has_adapters(names: Iterable[str]) -> bool:
    return any(map(is_adapter, names))


def _check_model(path: Path, saved: Shapes, ours: Shapes) -> None:
    """Raise RunError unless the names and shapes of ``saved`` equal ``ours``; DCP ignores surplus
    weights.
    """
    differing = [name for name in ours | saved if saved.get(name) != ours.get(name)]
    if not differing:
        return
    name = differing[0]
    stored, expected = ([*shapes[name]] if name in shapes else "absent" for shapes in (saved, ours))
    fused, fuse = (any(".wqkv." in key for key in shapes) for shapes in (saved, ours))
    reason = f"is of another model: {name} is {stored} in the checkpoint, {expected} in this run"
    if _has_adapters(ours) and not _has_adapters(saved):
        advice = "initial_load_path with initial_load_model_only=True"
        reason = f"was saved without trainer.lora; load it as trainer.checkpoint.{advice}"
    elif _has_adapters(saved) and not _has_adapters(ours):
        reason = "was saved with trainer.lora; load it with that, or start from the run's export"
    elif fused != fuse:
        reason = f"was saved with model.fuse_qkv={fused}; load it with that, not with {fuse}"
    raise RunError(f"{path} {reason}")
