"""Reading and writing of Hugging Face safetensors; a rank reads and writes only its own shards."""

import json
import math
import shutil
from collections.abc import Iterable
from contextlib import ExitStack
from itertools import chain, product
from operator import mul
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from torchtitan.config import TORCH_DTYPE_MAP

from rl.errors import RunError
from rl.host.disk import replace_folder, sync_file
from rl.model.dither import dithered
from rl.model.families import keep_language_model
from rl.model.hub import DESCRIPTIONS, INDEX, ONE_FILE
from rl.model.hugging_face_config import HuggingFaceConfig
from rl.model.reward_model import describe_reward_model
from rl.model.shape import ModelShape, family_of, hf_config
from rl.model.shards import Shard, Shards
from rl.model.updates import Update
from rl.training.all_ranks import on_every_rank, on_first_rank
from rl.training.engine import TrainingEngine
from rl.training.hugging_face_files import (
    StoredTensor,
    check_tensors,
    has_biases,
    require_finite,
    stored_tensors,
)
from rl.training.hugging_face_names import (
    EXPERT_BIAS,
    SCORE,
    HuggingFaceNames,
    Shapes,
    TensorPiece,
)
from rl.training.lora import base_of, peft_adapter, write_peft
from rl.training.sharded_model import named_weights, shards_of
from rl.training.value_head import ValueHead

FILE_BYTES = 5 * 10**9
"""Maximum size of a file, unless the source's split is used; a single tensor may exceed it."""

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class HuggingFaceFolders:
    """Reading and writing of a model's weights in Hugging Face folders.

    All ranks must call each method together. Nothing is gathered: besides its own shards, a rank
    holds one piece of a tensor at a time. If one rank fails, all ranks raise RunError with its rank
    and cause.
    """

    def __init__(self, engine: TrainingEngine, shape: ModelShape, source: str | None):
        self._engine = engine
        self._model = engine.model
        self._shape = shape
        self._base = base_of(engine.config.checkpoint, source)
        self._source = Path(source) if source is not None else None
        self._names = HuggingFaceNames(engine.model.config, family_of(shape))
        has_weights = self._source is not None and any(self._source.glob("*.safetensors"))
        self._stored = self._headers(self._source) if self._source and has_weights else {}

    @torch.no_grad()
    def load(self, folder: str) -> None:
        """Copy the folder's tensors into the model, cast to its dtype; adapters stay as they are.

        Raises RunError, naming the tensor, if one is missing, surplus or of another shape.
        """
        on_every_rank(f"loading {folder}", lambda: self._read(Path(folder)))

    @torch.no_grad()
    def export(self, folder: str, dtype: str = "") -> Update:
        """Write the weights, config.json, and the other files of the source. A model with a value
        head becomes a sequence classification of transformers with one label. Return the update of
        the weights since the source; empty if the source has none.

        Without ``dtype``, the name of one, weights have the dtypes that they started from.

        Adapters are merged into the weights, and written in the subfolder ``adapter`` for PEFT.
        Weights are split into files as in the source. ``folder`` appears when it is complete, and
        replaces an earlier export.
        """
        whole = Path(folder)
        partial = whole.with_name(f"{whole.name}.partial")
        shards = self._engine.shards()
        config = self._engine.adapters.worn
        adapter = peft_adapter(self._model, self._names, config)
        layouts = on_first_rank("export", lambda: self._create(whole, partial, dtype))
        written = on_every_rank("export", lambda: self._write(partial, shards, layouts))

        def finish() -> None:
            self._finish(partial, layouts, sum(size for size, _ in written), dtype)
            if config is not None:
                write_peft(partial / "adapter", adapter, config, base=self._base)
            replace_folder(whole, partial)

        on_first_rank("export", finish)
        return Update.total(update for _, update in written)

    def _tensors(self, shards: Shards) -> Shapes:
        return self._names.tensors({name: shard.shape for name, shard in shards.items()})

    @property
    def _has_values(self) -> bool:
        return isinstance(self._model.lm_head, ValueHead)

    def _read(self, folder: Path) -> None:
        stored = self._headers(folder)
        shards = shards_of(self._model)
        if self._has_values and SCORE not in stored:  # a language model: the head stays 0
            del shards["lm_head.weight"]
        check_parameters(folder, stored, self._names, {n: s.shape for n, s in shards.items()})
        dither = self._engine.config.dither
        read_tensors(folder, stored, self._names, shards.values(), dither=dither)

    def _headers(self, folder: Path) -> dict[str, StoredTensor]:
        return stored_tensors(folder, self._shape)

    def _create(self, whole: Path, partial: Path, dtype: str) -> dict[str, "_FileLayout"]:
        if whole.exists() and any(whole.iterdir()) and not any(whole.glob("*.safetensors")):
            raise RunError(
                f"{whole} holds something other than a model; name another folder to export to"
            )
        tensors = self._tensors(shards_of(self._model))
        default = TORCH_DTYPE_MAP.get(dtype or self._shape.dtype, torch.float32)
        dtypes = dict.fromkeys(tensors, default)
        files = {name: tensor.file for name, tensor in self._stored.items()}
        for name in tensors.keys() & files.keys() if not dtype else ():
            dtypes[name] = _DTYPES.get(self._stored[name].dtype, default)
        if not files.keys() >= tensors.keys():
            files = _split(tensors, default)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        contents: dict[str, Shapes] = {}
        for name, shape in tensors.items():
            contents.setdefault(files[name], {})[name] = shape
        layouts = {file: _file_layout(shapes, dtypes) for file, shapes in contents.items()}
        for file, layout in layouts.items():
            with (partial / file).open("wb") as out:
                out.write(layout.header)
                out.truncate(layout.size)
        return layouts

    def _write(
        self, folder: Path, shards: Shards, layouts: dict[str, "_FileLayout"]
    ) -> tuple[int, Update]:
        """Write the first replicas among this rank's shards. Return their number of bytes, and
        their update since the source, as far as its files still exist.
        """
        weights = named_weights(self._model)
        first = {name: shard for name, shard in shards.items() if _is_first_replica(weights[name])}
        written = 0
        update = Update()
        for file, pieces in _by_file(self._names, first.values(), _files(layouts)).items():
            with (folder / file).open("r+b") as out, ExitStack() as stack:
                opened: dict[str, Any] = {}
                for piece, part in pieces:
                    start, dtype = layouts[file].places[piece.tensor]
                    whole = part.to("cpu")
                    # A copy: memory that numpy shares can no longer be offloaded.
                    values = whole.to(dtype, copy=True).contiguous()
                    _write_piece(out, piece, start, values)
                    written += values.nbytes
                    source = self._stored.get(piece.tensor)
                    path = self._source / source.file if self._source and source else None
                    if source is None or path is None or not path.exists():
                        continue
                    if path.name not in opened:
                        opened[path.name] = stack.enter_context(safe_open(path, framework="pt"))
                    place = source.place_of(piece.in_tensor)
                    before = opened[path.name].get_slice(source.name)[place]
                    if self._engine.config.dither:
                        before = dithered(before, piece.in_tensor, piece.tensor)
                    update = Update.total([update, Update.of(before, whole, dtype)])
                sync_file(out)
        return written, update

    def _finish(
        self, folder: Path, layouts: dict[str, "_FileLayout"], written: int, dtype: str
    ) -> None:
        """Check the size of the weights; write the index, and the source's config, with ``dtype``
        if given, tokenizer and templates.
        """
        total = sum(layout.size - len(layout.header) for layout in layouts.values())
        if written != total:
            raise RunError(
                f"the ranks wrote {written} of {total} bytes: their shards do not tile the model"
            )
        if [*layouts] != [ONE_FILE]:
            index = {"metadata": {"total_size": total}, "weight_map": _files(layouts)}
            (folder / INDEX).write_text(json.dumps(index, indent=2))
        if self._source is not None:
            for path in chain.from_iterable(map(self._source.glob, DESCRIPTIONS)):
                if not path.name.endswith(".safetensors.index.json"):
                    shutil.copy(path, folder)
        config = folder / "config.json"
        if not config.exists():
            config.write_text(json.dumps(hf_config(self._shape), indent=2))
        described = HuggingFaceConfig("config.json", folder)
        if keep_language_model(described):
            described["architectures"] = [family_of(self._shape).policy_class]
            config.write_text(json.dumps(described, indent=2))
        if dtype:
            described = json.loads(config.read_text())
            described.pop("torch_dtype", None)
            config.write_text(json.dumps(described | {"dtype": dtype}, indent=2))
        if self._has_values:
            describe_reward_model(folder, family_of(self._shape).reward_class)


def check_parameters(
    folder: Path, stored: dict[str, StoredTensor], names: HuggingFaceNames, parameters: Shapes
) -> None:
    """Raise ConfigError, naming file and tensor, unless the tensors that are ``stored`` in
    ``folder`` are those of ``parameters``. Biases of routers may be missing.
    """
    lacks = "" if has_biases(stored) else EXPERT_BIAS
    wanted = names.tensors(parameters)
    check_tensors(folder, stored, {n: wanted[n] for n in wanted if not lacks or lacks not in n})


@torch.no_grad()
def read_tensors(
    folder: Path,
    stored: dict[str, StoredTensor],
    names: HuggingFaceNames,
    shards: Iterable[Shard],
    dtype: torch.dtype | None = None,
    *,
    dither: bool = False,
) -> None:
    """Copy tensors that are ``stored`` in ``folder`` into ``shards``, cast to ``dtype`` first if
    given, or moved by ``dither``. Biases of routers are 0 if the folder has none.
    """
    files = {name: tensor.file for name, tensor in stored.items()}
    by_file = _by_file(names, shards, files)
    for _, values in by_file.pop("", ()):
        values.zero_()
    for file, pieces in by_file.items():
        with safe_open(folder / file, framework="pt") as tensors:
            for piece, values in pieces:
                name = stored[piece.tensor].name
                numbers = tensors.get_slice(name)[stored[piece.tensor].place_of(piece.in_tensor)]
                require_finite(folder / file, name, numbers)
                if dither:
                    numbers = dithered(numbers, piece.in_tensor, piece.tensor)
                values.copy_(numbers.to(dtype or numbers.dtype))


def _by_file(
    names: HuggingFaceNames, shards: Iterable[Shard], files: dict[str, str]
) -> dict[str, list[tuple[TensorPiece, torch.Tensor]]]:
    """Return the pieces of ``shards`` and views of their values, by file; those of tensors without
    a file under "".
    """
    by_file: dict[str, list[tuple[TensorPiece, torch.Tensor]]] = {}
    for shard in shards:
        for piece in names.pieces(shard.name, shard.shape, shard.box):
            entries = by_file.setdefault(files.get(piece.tensor, ""), [])
            entries.append((piece, shard.tensor[piece.in_shard]))
    return by_file


class _FileLayout(NamedTuple):
    """Layout of a safetensors file: the header, preceded by its length, then the tensors."""

    header: bytes
    places: dict[str, tuple[int, torch.dtype]]
    """First byte of each tensor in the file, and its dtype."""
    size: int


def _file_layout(tensors: Shapes, dtypes: dict[str, torch.dtype]) -> _FileLayout:
    names = {dtype: name for name, dtype in _DTYPES.items()}
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts = {}
    end = 0
    # wide dtypes first, so that each tensor is aligned
    for name, shape in sorted(tensors.items(), key=lambda item: -dtypes[item[0]].itemsize):
        starts[name] = end
        end += math.prod(shape) * dtypes[name].itemsize
        span = [starts[name], end]
        entries[name] = {"dtype": names[dtypes[name]], "shape": [*shape], "data_offsets": span}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned
    header = len(text).to_bytes(8, "little") + text
    places = {name: (len(header) + start, dtypes[name]) for name, start in starts.items()}
    return _FileLayout(header, places, len(header) + end)


def _files(layouts: dict[str, _FileLayout]) -> dict[str, str]:
    return {tensor: file for file, layout in layouts.items() for tensor in layout.places}


def _split(tensors: Shapes, dtype: torch.dtype) -> dict[str, str]:
    """Return {tensor: file} with files of at most FILE_BYTES, named as Hugging Face does."""
    from huggingface_hub import split_state_dict_into_shards_factory

    return split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=lambda shape: math.prod(shape) * dtype.itemsize,
        filename_pattern=ONE_FILE.replace(".", "{suffix}."),
        max_shard_size=FILE_BYTES,
    ).tensor_to_filename


def _is_first_replica(parameter: torch.Tensor) -> bool:
    if not isinstance(parameter, DTensor):
        return dist.get_rank() == 0
    place = zip(parameter.device_mesh.get_coordinate() or (), parameter.placements, strict=True)
    return all(coordinate == 0 for coordinate, placement in place if placement.is_replicate())


def _write_piece(file: BinaryIO, piece: TensorPiece, start: int, values: torch.Tensor) -> None:
    """Write ``values`` into the tensor that begins at byte ``start``; neighbours in one call.

    Does not use a memory map: a full disk would kill the process, and on a network file system two
    hosts would overwrite each other's part of a shared page.
    """
    box = piece.in_tensor
    strides = [math.prod(piece.shape[d + 1 :]) * values.element_size() for d in range(values.ndim)]
    first = start + sum(map(mul, box.offset, strides))
    leading = values.ndim - 1  # dimensions before those that are one run of bytes in the file
    while leading > 0 and box.shape[leading:] == piece.shape[leading:]:
        leading -= 1
    places = product(*map(range, box.shape[:leading]))
    runs = values.view(torch.uint8).numpy().reshape(math.prod(box.shape[:leading]), -1)
    for place, run in zip(places, runs, strict=True):
        file.seek(first + sum(map(mul, place, strides)))
        file.write(run.data)
