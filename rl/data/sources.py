"""Files, folders and datasets of the Hugging Face Hub, opened by the package ``datasets``."""

import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from glob import glob
from os import PathLike
from pathlib import Path
from typing import Any

from rl.errors import ConfigError, require
from rl.model.hub import refuse_pointer

TABLES = {".parquet": "parquet", ".arrow": "arrow"}
"""Builders of ``datasets`` by the suffix of the file that each of them reads."""
SAVED = {"state.json", "dataset_dict.json"}
"""Files of the folders that ``save_to_disk`` writes."""
HUB_NAME = re.compile(r"\w[\w.-]*/(?!.*\.(jsonl?|parquet|arrow|csv|txt|gz|zst)$)\w[\w.-]*")
CONFIGS = re.compile(r"[Cc]onfig.*\[('.*')\]")
"""Names of configs in an error of ``datasets``."""
HUB_FIX = (
    "there is no such file or folder; a dataset of the Hub needs its full name, the network or a "
    "cache, and HF_TOKEN if it is private or gated"
)

is_quiet: ContextVar[bool] = ContextVar("is_quiet", default=False)
"""Whether no progress is shown of what is opened."""


@dataclass(kw_only=True)  # without slots, which only one base of a class may have
class SourceConfig:
    """Rows of a file, of a folder or of a dataset of the Hugging Face Hub."""

    path: str = ""
    """File of rows (JSONL, JSON, Parquet or Arrow), folder of such files or of
    ``Dataset.save_to_disk``, or name of a dataset of the Hugging Face Hub, such as
    ``openai/gsm8k``. A file or folder takes precedence over a name. Several, separated by commas,
    are read one after the other, and so are the files of a pattern such as ``data/*.jsonl``."""

    dataset_config: str = ""
    """Config of the dataset, such as ``main``. Empty: its default, or its only one."""

    split: str = ""
    """Split of the dataset, such as ``test`` or ``train[:1000]``. Empty: ``train``, or the only
    one."""

    revision: str = ""
    """Commit, tag or branch of a dataset of the Hub. Empty: the newest commit. A run writes it to
    ``config.json``, and reads it again if it is resumed."""


@dataclass(kw_only=True)
class HeldOutConfig(SourceConfig):
    """Rows to train on, and rows for evaluation of another source."""

    held_out_path: str = ""
    """Rows for evaluation, in a form that ``path`` may have. Empty: ``held_out_split`` or
    ``held_out_fraction`` of ``path``."""

    held_out_split: str = ""
    """Split of ``held_out_path``, or of ``path``, with the rows for evaluation."""

    def held_out(self) -> SourceConfig | None:
        """Return the source of the rows for evaluation; None if they are a share of ``path``."""
        if not (self.held_out_path or self.held_out_split):
            return None
        is_same = self.held_out_path in ("", self.path)
        return SourceConfig(
            path=self.held_out_path or self.path,
            dataset_config=self.dataset_config if is_same else "",
            split=self.held_out_split,
            revision=self.revision if is_same else "",
        )


@dataclass(frozen=True, slots=True)
class Table:
    """Rows that are open."""

    rows: Any
    """A ``datasets.Dataset``, or any iterable of rows."""
    name: str = ""
    """Path or name of the source, for errors; empty if the caller gave the rows."""

    @property
    def is_mapped(self) -> bool:
        """Whether the rows are files that are mapped into memory."""
        return bool(getattr(self.rows, "cache_files", None))


@dataclass(frozen=True, slots=True)
class Sets:
    """Sources that are open, and read one after the other."""

    parts: "list[Opened]"

    @property
    def is_mapped(self) -> bool:
        """Whether the rows of any part are mapped into memory."""
        return any(not isinstance(part, str) and part.is_mapped for part in self.parts)


Opened = Table | Sets | str
"""Rows that are open; a text is the path of a file of JSON."""


def set_names(path: str) -> list[str]:
    """Return the paths, patterns and names in ``path``, which commas separate."""
    whole = os.path.exists(os.path.expanduser(path))
    return [path] if whole else [name.strip() for name in path.split(",")]


def open_source(source: Any, field: str = "data.path") -> Opened:
    """Return the rows of ``source``.

    Parquet files and files of the Hub are converted once, to Arrow files in the cache of
    ``datasets``, which are mapped into memory. ``field`` is the config field that names the source.
    Raises ConfigError, naming that field or one beside it, if the source cannot be opened.
    """
    if isinstance(source, str | PathLike):
        source = SourceConfig(path=str(source))
    if not isinstance(source, SourceConfig):
        return source if isinstance(source, Table | Sets) else Table(source)
    path = os.path.expanduser(source.path)
    source = replace(source, path=path)
    if len(names := set_names(path)) > 1:
        return Sets([open_source(replace(source, path=name), field) for name in names])
    if os.path.isfile(path):
        refuse_pointer(path, field)
    elif any(wildcard in path for wildcard in "*?[") and not os.path.exists(path):
        files = sorted(glob(path, recursive=True))
        require(bool(files), f"no file matches {path!r}", field=field)
        return Sets([open_source(replace(source, path=name), field) for name in files])
    split_field = f"{field.removesuffix('path')}split"
    is_table = Path(path).suffix in TABLES and os.path.isfile(path)
    is_saved = os.path.isdir(path) and not SAVED.isdisjoint(os.listdir(path))
    known = 1 if is_table or is_saved else 2 if os.path.isdir(path) else 3 * is_hub_name(path)
    for name in ("split", "dataset_config", "revision")[known:]:
        unused = split_field if name == "split" else _beside(field, name)
        require(not getattr(source, name), f"{path!r} has none", field=unused)
    if not known:
        return path
    with _refusing(source, field):
        splits, take = _saved(path) if is_saved else _load(source)
    usual = "train" if field.endswith(".path") else ""
    try:
        return Table(take(source.split or ([*splits] if len(splits) == 1 else [usual])[0]), path)
    except (KeyError, ValueError):
        allowed = f"one of {', '.join(map(repr, splits))}"
        raise ConfigError(field=split_field, value=source.split, allowed=allowed) from None


def is_hub_name(path: str) -> bool:
    """Whether ``path`` names a dataset of the Hub, and no file or folder."""
    return bool(HUB_NAME.fullmatch(path)) and not os.path.exists(path)


def newest_commit(source: SourceConfig, field: str) -> str:
    """Return the newest commit of a dataset of the Hub. Raises ConfigError, naming ``field``, as
    :func:`open_source` does.
    """
    with _refusing(source, field):
        return str(_builder(source).hash)


def _beside(field: str, name: str) -> str:
    return f"{field.rpartition('.')[0]}.{name}"


def _saved(folder: str) -> tuple[Collection[str], Callable[[str], Any]]:
    """Return the names of the splits in a folder of ``save_to_disk``, and a function that opens
    one.
    """
    from datasets import load_from_disk

    data = load_from_disk(folder)
    named = data if isinstance(data, dict) else {"train": data}
    return named, named.__getitem__


def _load(source: SourceConfig) -> tuple[Collection[str], Callable[[str], Any]]:
    """Return the names of the splits of another source, and a function that opens one."""
    from datasets import disable_progress_bars

    if is_quiet.get():
        disable_progress_bars()
    builder = _builder(source)
    builder.download_and_prepare()
    return builder.info.splits, builder.as_dataset


def _builder(source: SourceConfig) -> Any:
    from datasets import load_dataset_builder
    from datasets.packaged_modules.cache.cache import Cache

    path = source.path
    if os.path.isfile(path):
        return load_dataset_builder(TABLES[Path(path).suffix], data_files=path)
    if os.path.isdir(path):  # a name such as "json" would be that of a builder
        path = os.path.abspath(path)
    revision = source.revision or None
    builder = load_dataset_builder(path, source.dataset_config or None, revision=revision)
    if isinstance(builder, Cache) and revision:  # without the Hub, any commit in the cache
        config = builder.config
        known = {"config_name": config.name, "version": str(config.version), "hash": revision}
        builder = Cache(repo_id=path, dataset_name=builder.dataset_name, **known)
    return builder


@contextmanager
def _refusing(source: SourceConfig, field: str) -> Iterator[None]:
    """Raise any error of ``datasets``, of the Hub or of a file as ConfigError."""
    from datasets.exceptions import DatasetGenerationError

    try:
        yield
    except Exception as error:
        cause = error.__cause__ if type(error) is DatasetGenerationError else None
        text = " ".join(str(cause or error).split()) or type(error).__name__
        if match := CONFIGS.search(text):
            named = _beside(field, "dataset_config")
            allowed = f"one of {match[1]}"
            raise ConfigError(field=named, value=source.dataset_config, allowed=allowed) from None
        fix = HUB_FIX if is_hub_name(source.path) else ""
        problem = f"{source.path!r} cannot be opened: {text}"
        raise ConfigError(problem, field=field, fix=fix) from error
