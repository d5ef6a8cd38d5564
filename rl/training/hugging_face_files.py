"""The tensors of a Hugging Face folder, from the headers of its safetensors files."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from rl.errors import ConfigError, require
from rl.model.hugging_face import read_json
from rl.model.shape import ModelShape
from rl.training.hugging_face_names import Shapes, hugging_face_tensors

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
READABLE = ("F64", "F32", "BF16", "F16")
COMPARED_ROWS = 64


class StoredTensor(NamedTuple):
    """Header of a tensor."""

    file: str
    """Name of its file in the folder."""
    shape: tuple[int, ...]
    dtype: str
    """Name of the dtype in safetensors, such as "BF16"."""


def check_folder(folder: Path, shape: ModelShape) -> None:
    """Raise ConfigError, naming file and tensor, unless ``folder`` holds the weights of a model of
    ``shape``.

    Reads headers alone, and a few rows of a tied head if the folder has one.
    """
    require(
        not (folder / ADAPTER).exists(),
        f"{folder} has an {ADAPTER}: transformers would add the adapter to the weights; merge it, "
        "or move it away",
    )
    stored = stored_tensors(folder)
    layers = shape.n_layers
    experts = shape.num_experts or 1
    require(  # before the names of that many are listed
        layers * experts <= len(stored),
        f"{folder} holds {len(stored)} tensors, fewer than num_hidden_layers={layers} times "
        f"num_experts={experts}",
    )
    check_tensors(folder, stored, hugging_face_tensors(shape))
    if shape.tie_embeddings and HEAD in stored:
        _check_tied_head(folder, stored)


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the header of each tensor, by name, of the files that transformers would read.

    Raises ConfigError, naming the file, if one is missing, damaged or not what the index says.
    """
    one_file = folder / ONE_FILE
    index = folder / INDEX
    if not index.is_file():
        require(
            one_file.is_file(),
            f"{folder} has neither {ONE_FILE} nor {INDEX}; save the model with transformers' "
            "save_pretrained",
        )
        return dict(_read_header(one_file))
    files = _read_index(index)
    require(
        not one_file.is_file() or set(files.values()) == {ONE_FILE},
        f"{folder} holds both {ONE_FILE} and {INDEX} of other files; remove the one that is out of "
        "date",
    )
    stored: dict[str, StoredTensor] = {}
    for file in sorted(set(files.values())):
        require(
            (folder / file).is_file(),
            f"{folder} lacks {file}, which {INDEX} names; copy or download the file again",
        )
        for name, tensor in _read_header(folder / file):
            require(
                name not in stored,
                f"{folder}: {name} is in both {stored.get(name, tensor).file} and {file}",
            )
            stored[name] = tensor
    for name, file in files.items():
        found = stored[name].file if name in stored else "none of the files"
        require(found == file, f"{index} says that {name} is in {file}; it is in {found}")
    return stored


def files_of(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the file of each tensor, as the index says; all are in one file without an index."""
    index = folder / INDEX
    return _read_index(index) if index.is_file() else dict.fromkeys(names, ONE_FILE)


def check_tensors(folder: Path, stored: dict[str, StoredTensor], wanted: Shapes) -> None:
    """Raise ConfigError, naming file and tensor, unless the ``stored`` tensors can become those
    ``wanted``.
    """
    missing = [name for name in wanted if name not in stored]
    require(not missing, f"{folder} lacks {_first_of(missing)}; its config.json asks for it")
    # A tied model has no head of its own, and rotary frequencies are computed.
    surplus = [
        name
        for name in stored
        if name not in wanted and name != HEAD and not name.endswith(".inv_freq")
    ]
    require(not surplus, f"{folder} holds {_first_of(surplus)}, for which the model has no place")
    for name, shape in wanted.items():
        file, found, dtype = stored[name]
        require(found == shape, f"{folder / file}: {name} is {[*found]}, the model's is {[*shape]}")
        require(
            dtype in READABLE,
            f"{folder / file}: {name} is {dtype}; it must be one of {', '.join(READABLE)}: "
            "dequantise the model first",
        )


def _read_header(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    try:
        with safe_open(path, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no dict
                header = tensors.get_slice(name)
                yield name, StoredTensor(path.name, tuple(header.get_shape()), header.get_dtype())
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}; it is damaged or no safetensors file: copy or "
            "download it again"
        ) from None


def _read_index(path: Path) -> dict[str, str]:
    """The index's {tensor: file name}."""
    files = read_json(path.name, path).get("weight_map")
    holds = (
        isinstance(files, dict)
        and bool(files)
        and all(isinstance(file, str) for file in files.values())
    )
    require(holds, f"{path} has no weight_map, which says for each tensor in which file it is")
    for file in set(files.values()):  # type: ignore[union-attr]
        require(Path(file).name == file, f"{path} names {file!r}; it must be a file of the folder")
    return files  # type: ignore[return-value]


def _check_tied_head(folder: Path, stored: dict[str, StoredTensor]) -> None:
    """Raise ConfigError unless the stored head is the embedding, by some of its rows: else
    transformers unties them.
    """
    shapes = [stored[name].shape for name in (EMBEDDING, HEAD)]
    same = shapes[0] == shapes[1] and all(
        map(torch.equal, _some_rows(folder, stored, EMBEDDING), _some_rows(folder, stored, HEAD))
    )
    require(
        same,
        f"{folder / stored[HEAD].file}: {HEAD} differs from {EMBEDDING}, but config.json has "
        f"tie_word_embeddings=True; set it to false, or remove {HEAD}",
    )


def _some_rows(folder: Path, stored: dict[str, StoredTensor], name: str) -> Iterator[torch.Tensor]:
    count = stored[name].shape[0]
    with safe_open(folder / stored[name].file, framework="pt") as tensors:
        rows = tensors.get_slice(name)
        for row in range(0, count, max(1, count // COMPARED_ROWS)):
            yield rows[row].float()


def _first_of(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "") if names else ""
