"""Checkpoints of a trainer rank through torchtitan's manager: DCP for resuming, Hugging Face for the world."""

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.checkpointer.base import MODEL
from torchtitan.components.checkpointer.dcp import AsyncMode, CheckpointManager
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.models.qwen3 import Qwen3StateDictAdapter

from rl.errors import RunError
from rl.model.shape import ModelConfig, hf_config, shape_of
from rl.training.engine import TrainingEngine

DESCRIPTIONS = ("*.json", "*.jinja", "*.txt", "*.model")


class _TrainState(Stateful):
    """What is neither weight nor optimizer: the policy version, and the controller's own state.

    It is written in the same DCP checkpoint, so that both are complete or neither is.
    """

    def __init__(self, engine: TrainingEngine):
        self.engine = engine
        self.run_state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {
            "version": self.engine.version,
            "skipped_steps": self.engine.skipped_steps,
            "run_state": json.dumps(self.run_state),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.engine.version = state["version"]
        self.engine.skipped_steps = state["skipped_steps"]
        self.run_state = json.loads(state["run_state"])


class Checkpointer:
    """Saves to and loads from ``folder``/``config.folder``/step-N; all ranks call each method alike."""

    def __init__(self, engine: TrainingEngine, model: ModelConfig, *, folder: str):
        self.engine, self.shape, self.hf_path = engine, shape_of(model), model.hf_path
        self._state = _TrainState(engine)
        self._adapter = Qwen3StateDictAdapter(engine.model.config, model.hf_path)
        config = dataclasses.replace(engine.config.checkpoint, enable=True, interval=1)  # the controller says when
        if model.hf_path is not None:
            config.initial_load_path = str(Path(model.hf_path).resolve())
            config.initial_load_in_hf = config.initial_load_model_only = True
        self._manager = CheckpointManager(
            config,
            dataloader=None,
            model_parts=[engine.model],
            optimizers=engine.optimizers,
            lr_schedulers=engine.schedule,
            states={"train_state": self._state},
            sd_adapter=self._adapter,
            base_folder=folder,
        )

    def save(self, step: int, run_state: dict[str, Any]) -> None:
        """Write step-``step``; ``run_state`` is JSON-able and comes back from ``load``."""
        self._state.run_state = run_state
        with _as_run_error(f"checkpoint {step}"):
            self._manager.save(step)

    def load(self, step: int = -1) -> dict[str, Any]:
        """Load checkpoint ``step``, or the newest complete one; where there is none, the Hugging Face folder.

        Returns the ``run_state`` of the checkpoint, empty if none was loaded.
        """
        with _as_run_error("loading the checkpoint"):
            self._manager.load(step)
        return self._state.run_state

    @torch.no_grad()
    def export_hf(self, folder: str) -> None:
        """Write safetensors and config.json that transformers loads, in the dtype the model started from."""
        dtype = TORCH_DTYPE_MAP.get(self.shape.dtype, torch.float32)
        weights = {name: tensor.to(dtype) for name, tensor in self._manager.states[MODEL].state_dict().items()}
        with _as_run_error("export"):
            self._manager.dcp_save(weights, checkpoint_id=folder, async_mode=AsyncMode.DISABLED, to_hf=True)
        if dist.get_rank() == 0:
            shutil.rmtree(Path(folder) / "sharded", ignore_errors=True)  # what the export was merged from
            self._describe(Path(folder))
        dist.barrier()

    def _describe(self, folder: Path) -> None:
        """Put config, tokenizer and templates of the original model beside the weights, or a config of our own."""
        if self.hf_path is None:
            (folder / "config.json").write_text(json.dumps(hf_config(self.shape), indent=2))
            return
        for pattern in DESCRIPTIONS:
            for path in Path(self.hf_path).glob(pattern):
                if not path.name.endswith(".safetensors.index.json"):
                    shutil.copy(path, folder)

    def close(self) -> None:
        """Wait for saves under way and stop the manager's threads."""
        self._manager.maybe_wait_for_saving()
        self._manager.close()


@contextlib.contextmanager
def _as_run_error(what: str) -> Iterator[None]:
    try:
        yield
    except CheckpointException as error:  # a BaseException: it would end the actor without a word
        rank, (cause, _) = next(iter(error.failures.items()))
        raise RunError(f"{what} failed on rank {rank}: {type(cause).__name__}: {cause}") from error
