"""Hugging Face safetensors in and out: each rank reads and writes exactly its own shards of the
weights.
"""

import json
import math
import os
import shutil
from collections.abc import Iterator
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from torchtitan.config import TORCH_DTYPE_MAP

from rl.disk import replace_folder
from rl.errors import RunError
from rl.model.shape import ModelShape, hf_config
from rl.model.shards import Box, Shards
from rl.training.all_ranks import on_every_rank, on_first_rank
from rl.training.engine import TrainingEngine
from rl.training.hugging_face_files import INDEX, ONE_FILE, check_tensors, files_of, stored_tensors
from rl.training.hugging_face_names import HuggingFaceNames, Shapes, TensorPiece
from rl.training.model import named_weights, shards_of
from rl.training.peft import adapter_tensors, write_adapter
from rl.training.values import ValueHead

DESCRIPTIONS = ("*.json", "*.jinja", "*.txt", "*.model")
FILE_BYTES = 5 * 10**9
"""Largest file of an export that follows no other folder's split; one tensor may exceed it."""

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class HuggingFaceFolders:
    """Reads a model's weights from Hugging Face folders and writes them as such; all ranks call
    alike.

    Nothing is gathered: beside its own shards a rank holds one piece of a tensor at a time. Where
    one rank fails, all of them raise RunError with its rank and cause.
    """

    def __init__(self, engine: TrainingEngine, shape: ModelShape, source: str | None):
        self._engine = engine
        self._model = engine.model
        self._shape = shape
        self._source = Path(source) if source is not None else None
        self._names = HuggingFaceNames(engine.model.config)

    @torch.no_grad()
    def load(self, folder: str) -> None:
        """Copy the folder's tensors into the model, cast to its dtype; adapters stay as they are.

        Raises RunError that names a tensor which is missing, too many or of another shape.
        """
        on_every_rank(f"loading {folder}", lambda: self._read(Path(folder)))

    @torch.no_grad()
    def export(self, folder: str) -> None:
        """Write the weights in the dtype that the model started from, config.json, and what the
        source adds.

        Adapters are merged into these, and written beside them in ``adapter``, for PEFT. Files are
        split as the source's are. ``folder`` appears when it is whole, in place of an earlier
        export.
        """
        whole = Path(folder)
        partial = whole.with_name(f"{whole.name}.partial")
        dtype = TORCH_DTYPE_MAP.get(self._shape.dtype, torch.float32)
        shards = self._engine.shards()
        adapters = adapter_tensors(self._model, self._names)
        layouts = on_first_rank("export", lambda: self._create(whole, partial, dtype))
        written = on_every_rank(
            "export", lambda: self._write(partial, self._own(shards), layouts, dtype)
        )
        on_first_rank(
            "export", lambda: self._finish(whole, partial, layouts, sum(written), adapters)
        )

    def _tensors(self) -> Shapes:
        return self._names.tensors({name: shard.shape for name, shard in self._shards().items()})

    def _shards(self) -> Shards:
        """Return the shards that a Hugging Face folder has: all but a critic's head."""
        shards = shards_of(self._model)
        if isinstance(self._model.lm_head, ValueHead):
            del shards["lm_head.weight"]
        return shards

    def _by_file(
        self, shards: Shards, files: dict[str, str]
    ) -> Iterator[tuple[str, list[tuple[TensorPiece, torch.Tensor]]]]:
        """The pieces of ``shards``, each with the part it indexes, file by file."""
        pieces = [
            (files[piece.tensor], (piece, shard.tensor))
            for name, shard in shards.items()
            for piece in self._names.pieces(name, shard.shape, shard.box)
        ]
        for file, group in groupby(sorted(pieces, key=itemgetter(0)), key=itemgetter(0)):
            yield file, [entry for _, entry in group]

    def _read(self, folder: Path) -> None:
        stored = stored_tensors(folder)
        check_tensors(folder, stored, self._tensors())
        files = {name: tensor.file for name, tensor in stored.items()}
        for file, pieces in self._by_file(self._shards(), files):
            with safe_open(folder / file, framework="pt") as tensors:
                for piece, shard in pieces:
                    target = piece.in_tensor.slices_in(Box.whole(piece.shape))
                    shard[piece.in_shard].copy_(tensors.get_slice(piece.tensor)[target])

    def _create(self, whole: Path, partial: Path, dtype: torch.dtype) -> dict[str, "_FileLayout"]:
        if whole.exists() and any(whole.iterdir()) and not any(whole.glob("*.safetensors")):
            raise RunError(
                f"{whole} holds something other than a model; name another folder to export to"
            )
        tensors = self._tensors()
        files = files_of(self._source, tensors) if self._source is not None else {}
        if not files.keys() >= tensors.keys():
            files = _split(tensors, dtype)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        layouts = _lay_out(tensors, files, dtype)
        for file, layout in layouts.items():
            with (partial / file).open("wb") as out:
                out.write(layout.header)
                out.truncate(layout.size)
        return layouts

    def _own(self, shards: Shards) -> Shards:
        """The parts that this rank writes: not those that a rank before it holds as well."""
        weights = named_weights(self._model)
        return {name: shard for name, shard in shards.items() if _is_first_replica(weights[name])}

    def _write(
        self, folder: Path, shards: Shards, layouts: dict[str, "_FileLayout"], dtype: torch.dtype
    ) -> int:
        files = {tensor: file for file, layout in layouts.items() for tensor in layout.starts}
        written = 0
        for file, pieces in self._by_file(shards, files):
            with (folder / file).open("r+b", buffering=0) as out:
                for piece, shard in pieces:
                    # A copy: memory that numpy has seen cannot be moved to the host any more.
                    values = shard[piece.in_shard].to("cpu", dtype, copy=True).contiguous()
                    _write_piece(out.fileno(), piece, layouts[file].starts[piece.tensor], values)
                    written += values.nbytes
                os.fsync(out)
        return written

    def _finish(
        self,
        whole: Path,
        partial: Path,
        layouts: dict[str, "_FileLayout"],
        written: int,
        adapters: dict[str, torch.Tensor],
    ) -> None:
        total = sum(layout.size - len(layout.header) for layout in layouts.values())
        if written != total:
            raise RunError(
                f"the ranks wrote {written} of {total} bytes: their shards do not tile the model"
            )
        if [*layouts] != [ONE_FILE]:
            index = {tensor: file for file, layout in layouts.items() for tensor in layout.starts}
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
            (partial / INDEX).write_text(text)
        self._describe(partial)
        if lora := self._engine.config.lora:
            base = str(self._source) if self._source else None
            write_adapter(partial / "adapter", adapters, lora, base=base)
        replace_folder(whole, partial)

    def _describe(self, folder: Path) -> None:
        """Put config, tokenizer and templates of the source beside the weights; without its config,
        one of our own.
        """
        if self._source is not None:
            for path in chain.from_iterable(map(self._source.glob, DESCRIPTIONS)):
                if not path.name.endswith(".safetensors.index.json"):
                    shutil.copy(path, folder)
        config = folder / "config.json"
        if not config.exists():
            config.write_text(json.dumps(hf_config(self._shape), indent=2))


class _FileLayout(NamedTuple):
    """A safetensors file: the header with its own length, then the tensors one after the other."""

    header: bytes
    starts: dict[str, int]
    """Byte of the file at which each tensor begins."""
    size: int


def _lay_out(tensors: Shapes, files: dict[str, str], dtype: torch.dtype) -> dict[str, _FileLayout]:
    """{file: layout} of ``tensors`` over ``files``, which says {tensor: file}."""
    contents: dict[str, Shapes] = {}
    for name, shape in tensors.items():
        contents.setdefault(files[name], {})[name] = shape
    return {file: _file_layout(shapes, dtype) for file, shapes in contents.items()}


def _file_layout(tensors: Shapes, dtype: torch.dtype) -> _FileLayout:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts = {}
    end = 0
    for name, shape in tensors.items():
        starts[name] = end
        end += math.prod(shape) * dtype.itemsize
        span = [starts[name], end]
        entries[name] = {"dtype": _DTYPES[dtype], "shape": [*shape], "data_offsets": span}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned
    header = len(text).to_bytes(8, "little") + text
    return _FileLayout(
        header, {name: len(header) + start for name, start in starts.items()}, len(header) + end
    )


def _split(tensors: Shapes, dtype: torch.dtype) -> dict[str, str]:
    """{tensor: file}, in files of at most FILE_BYTES, in Hugging Face's naming."""
    numbers = {}
    number = 1
    filled = 0
    for name, shape in tensors.items():
        size = math.prod(shape) * dtype.itemsize
        if filled and filled + size > FILE_BYTES:
            number += 1
            filled = 0
        numbers[name] = number
        filled += size
    if number == 1:
        return dict.fromkeys(tensors, ONE_FILE)
    return {name: f"model-{n:05d}-of-{number:05d}.safetensors" for name, n in numbers.items()}


def _is_first_replica(parameter: torch.Tensor) -> bool:
    if not isinstance(parameter, DTensor):
        return dist.get_rank() == 0
    place = zip(parameter.device_mesh.get_coordinate() or (), parameter.placements, strict=True)
    return all(coordinate == 0 for coordinate, placement in place if placement.is_replicate())


def _write_piece(file: int, piece: TensorPiece, start: int, values: torch.Tensor) -> None:
    """Write ``values`` into the tensor that begins at byte ``start``, whole rows at once where it
    can.

    Not through a memory map: there a full disk kills the process, and two hosts overwrite each
    other's part of a page that they share on a network file system.
    """
    row_bytes = math.prod(piece.shape[1:]) * values.element_size()
    row, *columns = piece.in_tensor.offset
    first = start + row * row_bytes + sum(columns) * values.element_size()
    rows = values.view(torch.uint8).numpy()
    if piece.in_tensor.shape[1:] == piece.shape[1:]:
        rows = rows.reshape(1, -1)
    for index, run in enumerate(rows):
        _write_all(file, memoryview(run), first + index * row_bytes)


def _write_all(file: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(file, data, offset)
        data = data[count:]
        offset += count
