"""Reading of DCP checkpoints without running code in them: only pickles of plain data are
accepted.
"""

import io
import pickle
import re
from enum import Enum, EnumType
from pathlib import Path, PosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, metadata
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torchtitan.components.checkpointer.base import LR_SCHEDULER, OPTIMIZER

from rl.compat.torch_checkpoint import METADATA_PARTS, set_element
from rl.errors import RunError
from rl.host.disk import restore_folder
from rl.training.hugging_face_files import require_finite

_CLASSES = (
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.StorageMeta,
    metadata.TensorProperties,
    metadata.TensorStorageMetadata,
    torch.Size,
    PosixPath,
)
_ALLOWED = {(part.__module__, part.__qualname__): part for part in (*METADATA_PARTS, *_CLASSES)}
"""Classes in the metadata of a checkpoint. torch's dtypes are allowed too."""


def load(state: dict[str, Any], folder: Path, *, alone: bool = False) -> None:
    """Call ``dcp.load`` into ``state`` from ``folder``; all ranks call it alike, or with ``alone``
    one process does.

    Raises, on all ranks, if the checkpoint names a class or function other than DCP's own, or if a
    tensor holds NaN or infinity.
    """
    dcp.load(state, storage_reader=_Reader(folder), planner=_Planner(folder), no_dist=alone)


def read_metadata(folder: Path) -> Metadata:
    """Return the metadata of the checkpoint in ``folder``.

    Raises RunError if the file holds anything except for metadata.
    """
    restore_folder(folder)
    return _Reader(folder).read_metadata()


def check_checkpoint(folder: Path) -> None:
    """Raise ConfigError, naming the tensor, if weights of a checkpoint hold NaN or infinity. Reads
    all of them. Raises RunError as :func:`read_metadata` does.
    """
    for name, entry in read_metadata(folder).state_dict_metadata.items():
        is_weight = not name.startswith((f"{OPTIMIZER}.", f"{LR_SCHEDULER}."))
        if is_weight and isinstance(entry, metadata.TensorStorageMetadata):
            values = torch.empty(entry.size, dtype=entry.properties.dtype)
            dcp.load({name: values}, storage_reader=_Reader(folder), no_dist=True)
            require_finite(folder, name, values)


class _Reader(FileSystemReader):
    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        path = Path(self.path, ".metadata")
        with open(path, "rb") as file:
            stored: Metadata = _Unpickler(file, path).load()
        stored.storage_meta = stored.storage_meta or metadata.StorageMeta()
        stored.storage_meta.load_id = self.load_id
        return stored


class _Planner(DefaultLoadPlanner):
    def __init__(self, folder: Path):
        super().__init__()
        self._folder = folder

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            entry = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            match = re.search(r"GLOBAL (\S+)", str(error))
            what = match[1] if match else "more than plain data"
            raise _refused(self._folder, f"its entry {name}", what) from error
        set_element(self.original_state_dict, self.mappings[name], entry)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        if not bool(tensor.isfinite().all()):
            problem = f"{read_item.dest_index.fqn} holds NaN or infinity"
            fix = "copy the folder again, or load a checkpoint that has not diverged"
            raise RunError(f"{self._folder} is refused: {problem}; {fix}")


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BufferedReader, path: Path):
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if (module, name) == ("builtins", "getattr"):
            return self._member
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise _refused(self._path.parent, self._path.name, f"{module}.{name}")

    def _member(self, kind: Any, name: Any) -> Enum:
        """Return a member of an enum: Python 3.11.0 to 3.11.3 pickle it as a call of getattr."""
        if not isinstance(kind, EnumType) or name not in kind.__members__:
            raise _refused(self._path.parent, self._path.name, "builtins.getattr")
        member: Enum = kind.__members__[name]
        return member


def _refused(folder: Path, where: str, what: str) -> RunError:
    return RunError(
        f"{folder} is refused: {where} names {what}, which could run code; no code was run. Load a "
        "checkpoint that Tiller wrote"
    )
