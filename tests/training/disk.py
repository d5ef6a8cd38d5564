"""Disks that are full, slow or counted, and what ranks do on them."""

import contextlib
import dataclasses
import os
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.checkpoint import FileSystemWriter

from rl.errors import RunError
from rl.model.digest import digests
from rl.model.shape import ModelConfig
from rl.model.shards import Shards
from rl.step_folders import StepFolders
from rl.training import hugging_face
from rl.training.checkpoint import Checkpointer
from rl.training.engine import TrainingEngine
from rl.training.hugging_face_names import TensorPiece
from rl.training.model import shard_of
from tests.training.batches import ragged_batch
from tests.training.layouts import LAYOUTS
from tests.training.scenes import TIED_FUSED, adopted, engine_of, learn


@contextlib.contextmanager
def full_disk(free: int = 4096) -> Iterator[None]:
    """Limit files of this process to ``free`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def names_in(checkpoints: Path) -> list[str]:
    """Return the sorted names of the files in ``checkpoints``."""
    return sorted(path.name for path in checkpoints.iterdir())


def checkpointer_of(
    engine: TrainingEngine, folder: str, model: ModelConfig = TIED_FUSED, **checkpoint: object
) -> Checkpointer:
    """Return a checkpointer with fields of its config set."""
    engine.config.checkpoint = dataclasses.replace(engine.config.checkpoint, **checkpoint)
    return Checkpointer(engine, model, folder=folder)


def write_to_a_disk_full_on_rank_1(layout: str, folder: str) -> list[str]:
    """Return this rank's errors of a checkpoint and an export if rank 1's disk is full."""
    engine = engine_of(TIED_FUSED, folder=folder, layout=LAYOUTS[layout])
    checkpointer = checkpointer_of(engine, folder)
    said = []
    for write in (
        lambda: checkpointer.save(1, {}),
        lambda: checkpointer.export_hf(f"{folder}/export"),
    ):
        with full_disk() if os.environ["RANK"] == "1" else contextlib.nullcontext():
            try:
                write()
            except RunError as error:
                said.append(str(error))
    checkpointer.close()
    return said


def save_and_step_on(layout: str, folder: str) -> dict[str, Any]:
    """Three async saves, the last of them held back until the optimizer has stepped."""
    engine = engine_of(TIED_FUSED, folder=folder, layout=LAYOUTS[layout])
    checkpointer = checkpointer_of(engine, folder, async_mode="async", keep_latest_k=2)
    for step in (1, 2):
        learn(engine, ragged_batch(seed=step))
        checkpointer.save(step, {"step": step})
    learn(engine, ragged_batch(seed=3))
    answer: dict[str, Any] = {"at the save": digests(everything(engine).values())}
    with held_writes("step-3"):
        checkpointer.save(3, {"step": 3})
        learn(engine, ragged_batch(seed=4))
        answer["a step later"] = digests(everything(engine).values())
        answer["complete while writing"] = StepFolders(Path(folder) / "checkpoints").complete()
    checkpointer.close()
    dist.barrier()
    answer["complete at the end"] = StepFolders(Path(folder) / "checkpoints").complete()
    return answer


@contextlib.contextmanager
def held_writes(name: str) -> Iterator[Callable[[], None]]:
    """DCP writes no data into the folder of that name before the end of the block, or before the
    call of the result.
    """
    end = threading.Event()
    write = FileSystemWriter.write_data

    def write_later(writer: FileSystemWriter, *args: Any) -> Any:
        assert writer.path.name != name or end.wait(60)
        return write(writer, *args)

    with mock.patch.object(FileSystemWriter, "write_data", write_later):
        try:
            yield end.set
        finally:
            end.set()


def adopt_and_count(folder: str, layout: str, export: str) -> dict[str, list[int]]:
    """Elements of this rank's parts, and of every piece that it reads from a Hugging Face folder
    and writes to one.
    """
    read: list[int] = []
    written: list[int] = []

    def open_counted(*args: Any, **kwargs: Any) -> CountedFile:
        return CountedFile(safe_open(*args, **kwargs), read)

    def write_counted(file: int, piece: TensorPiece, start: int, values: torch.Tensor) -> None:
        written.append(values.numel())
        write_piece(file, piece, start, values)

    write_piece = hugging_face._write_piece
    with (
        mock.patch.object(hugging_face, "safe_open", open_counted),
        mock.patch.object(hugging_face, "_write_piece", write_counted),
    ):
        shards = adopted(folder, LAYOUTS[layout], export)["parts"]
    return {"parts": shards, "read": read, "written": written}


class CountedFile(contextlib.AbstractContextManager):
    """A safetensors file that gives slices alone, and counts their elements."""

    def __init__(self, file: Any, read: list[int]):
        self._file = file
        self._read = read

    def __exit__(self, *args: Any) -> None:
        self._file.__exit__(*args)

    def keys(self) -> list[str]:
        return self._file.keys()

    def get_slice(self, name: str) -> Any:
        return CountedSlice(self._file.get_slice(name), self._read)


class CountedSlice:
    """A slice of such a file."""

    def __init__(self, stored: Any, read: list[int]):
        self.get_shape = stored.get_shape
        self._stored = stored
        self._read = read

    def __getitem__(self, index: Any) -> torch.Tensor:
        values = self._stored[index]
        self._read.append(values.numel())
        return values


def everything(engine: TrainingEngine) -> Shards:
    """Return this rank's parts of the weights and of the optimizer's moments."""
    state = {
        name: t
        for name, t in engine.optimizers.state_dict().items()
        if name.endswith(("exp_avg", "exp_avg_sq"))
    }
    moments = {name: shard_of(name, t) for name, t in state.items()}
    return engine.shards() | moments
