"""Tensors of a Hugging Face folder, from the headers of its safetensors files."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from rl.errors import ConfigError, require
from rl.model.hub import INDEX, ONE_FILE, read_index
from rl.model.hugging_face_config import read_json
from rl.model.reward_model import reward_class
from rl.model.shape import ModelShape, family_of
from rl.model.shards import Box
from rl.training.hugging_face_names import EXPERT_BIAS, SCORE, Shapes, hugging_face_tensors
from rl.types import Head

ADAPTER = "adapter_config.json"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
READABLE = ("F64", "F32", "BF16", "F16")
COMPARED_ROWS = 4096
"""Number of rows of a stored head that are compared with the embedding at a time."""


class StoredTensor(NamedTuple):
    """Header of a tensor."""

    file: str
    """Name of its file in the folder."""
    shape: tuple[int, ...]
    dtype: str
    """Name of the dtype in safetensors, such as "BF16"."""
    name: str
    """Name of the tensor in the file."""
    expert: int | None = None
    """Index in the tensor of the file, if that has all experts."""
    row: int = 0
    """First row there."""

    def place_of(self, box: Box) -> tuple[int | slice, ...]:
        """Return the index of ``box`` of the tensor in the tensor of the file."""
        rows, *rest = box.slices_in(Box.whole(self.shape))
        if self.expert is None:
            return rows, *rest
        return self.expert, slice(self.row + rows.start, self.row + rows.stop), *rest


def check_folder(
    folder: Path, shape: ModelShape, head: Head = "logprobs", *, needs_head: bool = True
) -> None:
    """Raise ConfigError, naming file and tensor, unless ``folder`` holds the weights of a model of
    ``shape`` with ``head``.

    Without ``needs_head``, a folder without a value head is accepted for a model with one. Reads
    headers only, and if a tied head is stored, its rows.
    """
    adapter = f"{folder} has an {ADAPTER}, which transformers would apply"
    require(not (folder / ADAPTER).exists(), adapter, fix="merge it or move it away")
    stored = stored_tensors(folder, shape, reports=True)
    layers = shape.n_layers
    experts = 1 if shape.swiglu else shape.num_experts or 1  # all clamped experts share tensors
    require(  # before the names of all tensors are built
        layers * experts <= len(stored),
        f"{folder} holds {len(stored)} tensors, fewer than num_hidden_layers={layers} times "
        f"num_experts={experts}",
    )
    shape = replace(shape, expert_bias=shape.expert_bias and has_biases(stored))
    wanted = hugging_face_tensors(shape)
    if head == "values":
        wanted.pop(HEAD, None)
        if needs_head or SCORE in stored:
            wanted[SCORE] = (1, shape.dim)
    else:
        problem = f"{folder} holds {SCORE}: it is a reward model, from which no policy can start"
        require(SCORE not in stored, f"{problem}; name the folder of a language model")
        path = folder / "config.json"
        kind = reward_class(read_json("config.json", path))
        require(
            kind is None,
            f"architectures in {path} is {[kind]}, a reward model; name the folder of a language "
            "model",
        )
    check_tensors(folder, stored, wanted)
    if head == "logprobs" and shape.tie_embeddings and HEAD in stored:
        _check_tied_head(folder, stored)


def check_finite(folder: Path, shape: ModelShape) -> None:
    """Raise ConfigError, naming file and tensor, if a tensor in ``folder`` holds NaN or infinity.
    Reads all tensors.
    """
    for stored in stored_tensors(folder, shape).values():
        for rows in _rows(folder, stored) if stored.shape else ():
            require_finite(folder / stored.file, stored.name, rows)


def require_finite(path: Path, name: str, values: torch.Tensor) -> None:
    """Raise ConfigError if ``values`` of tensor ``name`` in file ``path`` hold NaN or infinity."""
    fix = "copy or download the file again, or name a model that has not diverged"
    require(bool(values.isfinite().all()), f"{path}: {name} holds NaN or infinity", fix=fix)


def has_biases(stored: Iterable[str]) -> bool:
    """Return whether the biases of routers are among the tensors ``stored``, by name."""
    return any(name.endswith(EXPERT_BIAS) for name in stored)


def stored_tensors(
    folder: Path, shape: ModelShape, *, reports: bool = False
) -> dict[str, StoredTensor]:
    """Return the header of each tensor of the language model, by name, of the files that
    transformers would read.

    As in transformers, names may lack "model." or have it twice, and the head of a tied model may
    stand for its embedding. ``reports`` says how many tensors are left out. Raises ConfigError,
    naming the file, if a file is missing, damaged or contradicts the index.
    """
    family = family_of(shape)
    one_file = folder / ONE_FILE
    index = folder / INDEX
    files = read_index(index) if index.is_file() else {}
    neither = f"{folder} has neither {ONE_FILE} nor {INDEX}"
    require(index.is_file() or one_file.is_file(), neither, fix="save it with save_pretrained")
    names = sorted({*files.values()}) or [ONE_FILE]
    both = f"{folder} holds both {ONE_FILE} and {INDEX} of other files"
    holds = not one_file.is_file() or names == [ONE_FILE]
    require(holds, both, fix="remove the outdated one")
    stored: dict[str, StoredTensor] = {}
    files_by_tensor: dict[str, str] = {}
    for file in names:
        lacks = f"{folder} lacks {file}, which {INDEX} names"
        require((folder / file).is_file(), lacks, fix="copy or download the file again")
        for tensor in _read_header(folder / file):
            files_by_tensor[tensor.name] = file
            bare = tensor.name.removeprefix("model.").removeprefix("model.")
            if bare.startswith(family.left_out):
                continue
            bare = bare.removeprefix("language_model.") if family.left_out else bare
            name = bare if bare in (HEAD, SCORE) else f"model.{bare}"
            for key, part in _by_expert(name, tensor, family.stacked):
                first = stored.setdefault(key, part)
                require(first is part, f"{folder}: {key} is in both {first.file} and {file}")
    left_out = len(files_by_tensor) - len({header.name for header in stored.values()})
    if reports and left_out:
        _report_left_out(folder, left_out)
    for name, file in files.items():
        holder = files_by_tensor.get(name, "none of the files")
        require(holder == file, f"{index} says that {name} is in {file}; it is in {holder}")
    if shape.tie_embeddings and EMBEDDING not in stored and HEAD in stored:
        stored[EMBEDDING] = stored[HEAD]
    return stored


def _by_expert(
    name: str, tensor: StoredTensor, stacked: Mapping[str, tuple[str, ...]]
) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors of each expert, by name, of a tensor that has those of all; any other
    tensor itself.
    """
    end = ".".join(name.split(".")[-3:])
    parts = stacked.get(end, ())
    if len(tensor.shape) != 3 or not parts:
        yield name, tensor
        return
    experts, rows, columns = tensor.shape
    rows //= len(parts)
    for expert in range(experts):
        for number, part in enumerate(parts):
            part_name = f"{name.rpartition('.')[0]}.{expert}.{part}.weight"
            shape = (rows, columns)
            yield part_name, tensor._replace(shape=shape, expert=expert, row=number * rows)


@cache
def _report_left_out(folder: Path, count: int) -> None:
    """Say once that ``count`` tensors of ``folder`` are not read."""
    what = "tensors of vision and of multi-token prediction, which are not trained"
    logging.getLogger(__name__).warning("%s: leaving out %s %s", folder, count, what)


def check_tensors(folder: Path, stored: dict[str, StoredTensor], wanted: Shapes) -> None:
    """Raise ConfigError, naming file and tensor, unless the ``stored`` tensors have the
    names and shapes of ``wanted``, and readable dtypes.
    """
    missing = [name for name in wanted if name not in stored]
    require(
        missing != [SCORE],
        f"{folder} lacks {SCORE}: it is a language model; name the export of a reward model",
    )
    require(not missing, f"{folder} lacks {_first_of(missing)}; its config.json asks for it")
    # A tied model has no separate head, and rotary frequencies are computed.
    known = {*wanted, HEAD}
    surplus = [
        tensor.name
        for name, tensor in stored.items()
        if name not in known and not name.endswith(".inv_freq")
    ]
    require(not surplus, f"{folder} holds {_first_of(surplus)}, for which the model has no place")
    for name, shape in wanted.items():
        file, saved, dtype, *_ = stored[name]
        require(saved == shape, f"{folder / file}: {name} is {[*saved]}, the model's is {[*shape]}")
        require(
            dtype in READABLE,
            f"{folder / file}: {name} is {dtype}; dequantise the model to one of "
            f"{', '.join(READABLE)} first",
        )


def _read_header(path: Path) -> Iterator[StoredTensor]:
    try:
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dict
                header = tensors.get_slice(name)
                shape = tuple(header.get_shape())
                yield StoredTensor(path.name, shape, header.get_dtype(), name)
    except (OSError, SafetensorError) as error:
        problem = f"{path} cannot be read: {error}"
        raise ConfigError(problem, fix="copy or download the file again") from None


def _check_tied_head(folder: Path, stored: dict[str, StoredTensor]) -> None:
    """Raise ConfigError if the stored head differs from the embedding: transformers would untie
    them.
    """
    if stored[EMBEDDING] == stored[HEAD]:
        return
    rows = [_rows(folder, stored[name]) for name in (EMBEDDING, HEAD)]
    same = stored[EMBEDDING].shape == stored[HEAD].shape and all(map(torch.equal, *rows))
    problem = (
        f"{folder / stored[HEAD].file}: {HEAD} differs from {EMBEDDING}, but config.json has "
        "tie_word_embeddings=True"
    )
    require(same, problem, fix=f"set it to false, or remove {HEAD}")


def _rows(folder: Path, stored: StoredTensor) -> Iterator[torch.Tensor]:
    with safe_open(folder / stored.file, framework="pt") as tensors:
        values = tensors.get_slice(stored.name)
        whole = Box.whole(stored.shape)
        for row in range(0, stored.shape[0], COMPARED_ROWS):
            count = min(COMPARED_ROWS, stored.shape[0] - row)
            yield values[stored.place_of(whole.slab(0, row, count))].float()


def _first_of(names: list[str]) -> str:
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{others}" if names else ""
