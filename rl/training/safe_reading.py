"""Reading of DCP checkpoints that runs no code of theirs: pickles of plain data alone are
accepted.
"""

import io
import pickle
import re
from pathlib import Path, PosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from rl.compat.torch_checkpoint import METADATA_PARTS, set_element
from rl.errors import RunError

_ALLOWED = {
    (allowed.__module__, allowed.__qualname__): allowed
    for allowed in (
        *METADATA_PARTS,
        Metadata,
        StorageMeta,
        MetadataIndex,
        BytesStorageMetadata,
        TensorStorageMetadata,
        ChunkStorageMetadata,
        TensorProperties,
        torch.Size,
        PosixPath,
    )
}
"""Classes in the metadata of a checkpoint; data types of torch are allowed too."""


def load(state: dict[str, Any], folder: Path) -> None:
    """``dcp.load`` into ``state`` from ``folder``; all ranks call it alike.

    Raises, on all ranks, for a checkpoint that names any class or function but DCP's own.
    """
    dcp.load(state, storage_reader=_Reader(folder), planner=_Planner(folder))


def read_metadata(folder: Path) -> Metadata:
    """Metadata of the checkpoint in ``folder``.

    Raises RunError if more than metadata is in its file.
    """
    return _Reader(folder).read_metadata()


class _Reader(FileSystemReader):
    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        path = Path(self.path, ".metadata")
        with open(path, "rb") as file:
            metadata = _Unpickler(file, path).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Planner(DefaultLoadPlanner):
    def __init__(self, folder: Path):
        super().__init__()
        self._folder = folder

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            entry = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            found = re.search(r"GLOBAL (\S+)", str(error))
            raise _refused(
                self._folder, f"its entry {name}", found[1] if found else "more than plain data"
            ) from error
        set_element(self.original_state_dict, self.mappings[name], entry)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BufferedReader, path: Path):
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise _refused(self._path.parent, self._path.name, f"{module}.{name}")


def _refused(folder: Path, where: str, what: str) -> RunError:
    return RunError(
        f"{folder} is refused: {where} names {what}, which no checkpoint needs and which could run "
        "code; nothing of it was run. Take a checkpoint that Tiller wrote"
    )
