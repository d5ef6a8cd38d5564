"""Tokenizer of a Hugging Face folder."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl.errors import ConfigError, require
from rl.model.hugging_face_config import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


GENERATION = "generation_config.json"


def load_tokenizer(hf_path: str) -> "PreTrainedTokenizerFast":
    """Return the tokenizer of a Hugging Face folder.

    Raises ConfigError, naming the file, if a file is damaged or tokenizer.json is missing.
    """
    from transformers import PreTrainedTokenizerFast

    files = [Path(hf_path) / name for name in ("tokenizer.json", "tokenizer_config.json")]
    fix = "save the tokenizer beside the model"
    has_one = files[0].is_file()
    require(has_one, f"{hf_path!r} has no tokenizer.json", field="model.hf_path", fix=fix)
    for path in filter(Path.exists, files):
        read_json("model.hf_path", path)
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(hf_path, local_files_only=True)
    except Exception as error:  # of many kinds, from transformers, tokenizers and Python
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        problem = f"the tokenizer in {hf_path!r} cannot be loaded: {cause}"
        raise ConfigError(problem, field="model.hf_path", fix="save it again") from None
    return tokenizer


def difference(hf_path: str, other: str) -> str:
    """Return text that names the first token id that means something else to the tokenizer in the
    folder ``other``; empty if there is none, or a folder has no tokenizer.
    """
    folders = [Path(hf_path), Path(other)]
    if folders[0] == folders[1] or not all((path / "tokenizer.json").is_file() for path in folders):
        return ""
    first, second = (
        {token: text for text, token in load_tokenizer(str(folder)).get_vocab().items()}
        for folder in folders
    )
    for token in sorted(first.keys() | second.keys()):
        if first.get(token) != second.get(token):
            return f"token {token} is {first.get(token)!r} here and {second.get(token)!r} there"
    return ""


def require_room(tokenizer: "PreTrainedTokenizerFast", vocab_size: int) -> None:
    """Raise ConfigError if a token of the tokenizer has no embedding in a model of
    ``vocab_size``.
    """
    size = max(tokenizer.get_vocab().values(), default=-1) + 1
    require(
        size <= vocab_size,
        f"{vocab_size} is smaller than the tokenizer's vocabulary",
        field="model.vocab_size",
        fix=f"set it to {size} or more, or, with model.hf_path, use the tokenizer of that model",
    )


def require_chat_template(tokenizer: "PreTrainedTokenizerFast") -> None:
    """Raise ConfigError if the tokenizer has no chat template."""
    require(
        bool(tokenizer.chat_template),
        f"the tokenizer in {tokenizer.name_or_path!r} has no chat template",
        field="model.hf_path",
        fix="use an instruction-tuned model or add chat_template.jinja",
    )


def named_stop_tokens(tokenizer: "PreTrainedTokenizerFast") -> dict[str, list[int]]:
    """Return the eos tokens by what names them: a file in the folder of ``tokenizer``, which is
    generation_config.json if that names some and config.json otherwise, and the tokenizer.

    Raises ConfigError for an eos_token_id that the tokenizer does not have.
    """
    folder = Path(tokenizer.name_or_path)
    paths = [folder / GENERATION, folder / "config.json"] if tokenizer.name_or_path else []
    by_file = {path: _stops_in(path) for path in paths if path.exists()}
    path, listed = next((item for item in by_file.items() if item[1]), (folder / GENERATION, []))
    size = len(tokenizer)
    wrong = [token for token in listed if type(token) is not int or not 0 <= token < size]
    problem = f"eos_token_id in {path} is {wrong[0] if wrong else ''!r}"
    fix = f"it must be one or more of the {size} token ids of the tokenizer"
    require(not wrong, problem, field="model.hf_path", fix=fix)
    stop = tokenizer.eos_token_id
    return {path.name: listed, "the tokenizer": [] if stop is None else [stop]}


def read_stop_token_ids(tokenizer: "PreTrainedTokenizerFast") -> tuple[int, ...]:
    """Return all :func:`named_stop_tokens`, the tokenizer's first."""
    named = reversed(named_stop_tokens(tokenizer).values())
    return tuple(dict.fromkeys(token for tokens in named for token in tokens))


def missing_stop_tokens(folder: Path, stops: Sequence[int]) -> list[int]:
    """Return those of ``stops`` at which generation from the model in ``folder`` goes on."""
    return [token for token in stops if token not in _generation_stops(folder)]


def write_stop_tokens(folder: Path, stops: Sequence[int]) -> None:
    """End generation from the model in ``folder`` at ``stops`` too.

    If one of them is new, the first one becomes the eos token of the tokenizer.
    """
    if not missing_stop_tokens(folder, stops):
        return
    config = read_json("config.json", folder / "config.json")
    path = folder / "generation_config.json"
    written: dict[str, Any] = {name: config.get(name) for name in ("bos_token_id", "pad_token_id")}
    if path.exists():
        written = read_json(path.name, path)
    written["eos_token_id"] = [*dict.fromkeys([*stops, *_generation_stops(folder)])]
    path.write_text(json.dumps(written, indent=2))
    config["eos_token_id"] = stops[0]
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    name_special_token(folder, "eos_token", stops[0])


def name_special_token(folder: Path, name: str, token: int) -> None:
    """Write the token that ``name`` stands for, such as "pad_token", to the tokenizer's files."""
    text = load_tokenizer(str(folder)).convert_ids_to_tokens(token)
    for path in (folder / "tokenizer_config.json", folder / "special_tokens_map.json"):
        if path.is_file():
            content: dict[str, Any] = read_json(path.name, path)
            content[name] = text
            path.write_text(json.dumps(content, indent=2, ensure_ascii=False))


def _generation_stops(folder: Path) -> list[int]:
    """Return the tokens at which transformers ends generation from the model in ``folder``."""
    has_own = (folder / GENERATION).exists()
    return _stops_in(folder / (GENERATION if has_own else "config.json"))


def _stops_in(path: Path) -> list[int]:
    eos = read_json("model.hf_path", path).get("eos_token_id")
    return eos if isinstance(eos, list) else [] if eos is None else [eos]
