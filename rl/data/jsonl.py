"""Rows of files, of datasets and of lists, with errors that name the row."""

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

from rl.data.sources import Sets, SourceConfig, Table, open_source
from rl.dialects.plain_text import is_unicode
from rl.errors import ConfigError, require, shown

BOM = b"\xef\xbb\xbf"
GZIP, ZSTD = b"\x1f\x8b", b"(\xb5/\xfd"
OTHER_BEGINS = {
    **dict.fromkeys((b"\xff\xfe", b"\xfe\xff"), "UTF-16"),
    **{b"BZ": "compressed by bzip2", b"PK": "a zip archive"},
    **{b"\xfd7": "compressed by xz", b"PA": "Parquet"},
}
"""Forms of files by their first two bytes."""
EVERY = 10_000  # rows between two lines of progress

_listener: ContextVar[Callable[[str], None] | None] = ContextVar("listener", default=None)

Source = SourceConfig | Table | Sets | str | PathLike[str] | Iterable[Mapping[str, Any]]
"""Path of a file or folder, name of a dataset of the Hugging Face Hub, or a config with these; or a
``datasets.Dataset``, a list or any iterable of rows."""


Found = tuple[str, int, Any]
"""Place, number and value of a row that may be no object."""


@dataclass(frozen=True, slots=True)
class Row:
    """One object of a source."""

    where: str
    """Source and place, for errors: ``data.path: FILE line 3``."""
    line: int
    """Line of the JSONL file, from 1; of other sources, number of the row, from 0."""
    value: Mapping[str, Any]
    field: str = ""
    """Config field that names the source."""
    part: int = 0
    """Number of the row's set, of those that the source names."""

    @property
    def unit(self) -> str:
        """Unit of ``line``: ``line`` or ``row``."""
        return self.where.split()[-2]

    @property
    def columns(self) -> str:
        """Names of the columns, and the field that maps them, as the fix of an error."""
        names = ", ".join(map(repr, self.value)) or "none"
        return f"the row has {names}; name the column of the field in {self.section}.columns"

    @property
    def section(self) -> str:
        """Section of the config that names the source."""
        return self.field.rpartition(".")[0]

    def error(self, problem: str, *, fix: str = "") -> ConfigError:
        """Return an error that names the row."""
        return ConfigError(f"{self.where}: {problem}", field=self.field, fix=fix)

    def renamed(self, columns: Mapping[str, str]) -> "Row":
        """Return the row with ``columns`` under the names of their fields, and without the fields
        whose column is "".

        Raises ConfigError if it lacks one of the columns.
        """
        for name in filter(None, columns.values()):
            if name not in self.value:
                problem = f"{self.section}.columns names {name!r}; the row has no such column"
                raise self.error(problem, fix=self.columns)
        moved = {*columns.values(), *(ours for ours, column in columns.items() if not column)}
        rest = {key: item for key, item in self.value.items() if key not in moved}
        named = {ours: self.value[column] for ours, column in columns.items() if column}
        return replace(self, value=rest | named)

    def text(self, name: str, *, empty: bool = False) -> str:
        """Return the text in field ``name``.

        Raises ConfigError if it is missing, no text, not Unicode or, unless ``empty`` is True,
        blank.
        """
        value = self.value.get(name)
        if not isinstance(value, str) or not (empty or value.strip()):
            fix = "" if name in self.value else self.columns
            raise self.error(f"field {name!r} is missing or not text{_given(value)}", fix=fix)
        if not is_unicode(value):
            problem = f"field {name!r} has half of a surrogate pair, as \\ud800"
            raise self.error(problem, fix="remove it")
        return value

    def json(self, name: str) -> Any:
        """Return field ``name``, which may be JSON text, as tables have it. Raises ConfigError."""
        value = self.value.get(name)
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except (ValueError, RecursionError) as error:
            raise self.error(f"field {name!r} is not JSON: {error}") from None


def read_rows(source: Source, *, field: str = "data.path", form: str = "{…}") -> Iterator[Row]:
    """Yield the rows of ``source``.

    ``field`` is the config field that names the source and ``form`` an example of a row, both for
    errors. In rows of a ``datasets.Dataset``, keys of nested objects that are null are left out:
    Arrow adds them to every row if one row has them. Raises ConfigError that names the first row
    that cannot be read, or if there is no row.
    """
    opened = open_source(source, field)
    if opened == "":
        fix = f"name a JSONL file whose lines are {form}, or another source of such rows"
        raise ConfigError("not set", field=field, fix=fix)
    if isinstance(opened, Sets):
        for part, inner_source in enumerate(opened.parts):
            for row in read_rows(inner_source, field=field, form=form):
                yield replace(row, part=part)
        return
    if isinstance(opened, Table):
        name = opened.name or f"the {type(opened.rows).__name__}"
        rows = _of_table(opened, field)
    else:
        name = opened
        rows = _of_file(opened, field)
    is_empty = True
    for where, number, value in rows:
        is_empty = False
        row = Row(where, number, value, field)
        if not isinstance(value, Mapping):
            raise row.error(f"not a JSON object{_given(value)}", fix=f"write {form}")
        yield row
    fix = f"each line should be a JSON object {form}"
    require(not is_empty, f"{name} is empty", field=field, fix=fix)


def _of_file(path: str, field: str) -> Iterator[Found]:
    source = f"{field}: {path}"
    try:
        with open(path, "rb") as file:
            lines = _decompressed(file)
            for number, raw in enumerate(lines, start=1):
                if number % EVERY == 0:
                    tell_progress(f"read {number:,} lines of {path}")
                where = f"{source} line {number}"
                if number == 1 and raw[:2] in OTHER_BEGINS:
                    problem = f"{where}: not JSON: the file is {OTHER_BEGINS[raw[:2]]}"
                    raise ConfigError(problem, field=field, fix="save it as UTF-8")
                if number == 1:
                    raw = raw.removeprefix(BOM)
                if number == 1 and raw.lstrip().startswith(b"["):
                    array = _parsed(source, raw + lines.read(), field)
                    yield from _of_table(Table(array, path), field)
                elif raw.strip():
                    yield where, number, _parsed(where, raw, field)
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path!r}", field=field) from None
    except (OSError, EOFError, zlib.error) as error:  # no permission, a broken disk or archive
        problem = f"{path!r} cannot be read: {getattr(error, 'strerror', None) or error}"
        raise ConfigError(problem, field=field) from None


def _decompressed(file: io.BufferedReader) -> Any:
    """Return ``file`` as it was before gzip or zstd compressed it."""
    begin = file.peek(4)
    if begin[:2] == GZIP:
        return gzip.open(file)
    if begin[:4] != ZSTD:
        return file
    import pyarrow

    return io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"))


def _of_table(table: Table, field: str) -> Iterator[Found]:
    rows = table.rows
    nested = type(rows).__module__.partition(".")[0] == "datasets"
    if isinstance(rows, Mapping) or not isinstance(rows, Iterable):
        fix = f"take one of its splits, {', '.join(map(str, rows))}" if nested else "give rows"
        raise ConfigError(f"a {type(rows).__name__} has no rows", field=field, fix=fix)
    source = f"{field}: {table.name}".rstrip()
    for number, value in enumerate(rows):
        if number and number % EVERY == 0:
            tell_progress(f"read {number:,} rows of {table.name or field}")
        yield f"{source} row {number}", number, without_nulls(value) if nested else value


def _parsed(where: str, raw: bytes, field: str) -> Any:
    try:
        return json.loads(raw.decode())
    except UnicodeDecodeError as error:
        problem = f"{where}: not JSON: {error}"
        raise ConfigError(problem, field=field, fix="save the file as UTF-8") from None
    except (ValueError, RecursionError) as error:  # also if nested too deep
        raise ConfigError(f"{where}: not JSON: {error}", field=field) from None


def without_nulls(value: Any) -> Any:
    """Return ``value`` without keys that are null in any object within it."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def _given(value: Any) -> str:
    return "" if value is None else f": {shown(value)}"


def tell_progress(text: str) -> None:
    """Show ``text``, such as "read 2,000 of 9,000 lines", while data is read. Cheap to call."""
    if (listener := _listener.get()) is not None:
        listener(text)


@contextmanager
def showing_progress(listener: Callable[[str], None]) -> Iterator[None]:
    """Pass the texts of :func:`tell_progress` within the block to ``listener``."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
