"""Rows of JSONL files, of ``datasets.Dataset`` and of lists, with errors that name the row."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

from rl.dialects.plain_text import is_unicode
from rl.errors import ConfigError, shown

BOM = b"\xef\xbb\xbf"
OTHER_BOMS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
EVERY = 10_000  # rows between two lines of progress

_listener: ContextVar[Callable[[str], None] | None] = ContextVar("listener", default=None)

Source = str | PathLike[str] | Iterable[Mapping[str, Any]]
"""Path of a JSONL file; or a ``datasets.Dataset``, a list or any iterable of rows."""


@dataclass(frozen=True, slots=True)
class Row:
    """One object of a source."""

    where: str
    """Source and place, for errors: ``data.path: FILE line 3``."""
    line: int
    """Line of the file, from 1; of other sources, number of the row, from 0."""
    value: Mapping[str, Any]
    field: str = ""
    """Config field that names the source."""

    def error(self, problem: str, *, fix: str = "") -> ConfigError:
        """Return an error that names the row."""
        return ConfigError(f"{self.where}: {problem}", field=self.field, fix=fix)

    def text(self, name: str, *, empty: bool = False) -> str:
        """Return the text in field ``name``.

        Raises ConfigError if it is missing, no text, not Unicode or, unless ``empty`` is True,
        blank.
        """
        value = self.value.get(name)
        if not isinstance(value, str) or not (empty or value.strip()):
            raise self.error(f"field {name!r} is missing or not text{_given(value)}")
        if not is_unicode(value):
            problem = f"field {name!r} has half of a surrogate pair, as \\ud800"
            raise self.error(problem, fix="remove it")
        return value


def read_rows(source: Source, *, field: str = "data.path", form: str = "{…}") -> Iterator[Row]:
    """Yield the rows of ``source``.

    ``field`` is the config field that names the source and ``form`` an example of a row, both for
    errors. In rows of a ``datasets.Dataset``, keys of nested objects that are null are left out:
    Arrow adds them to every row if one row has them. Raises ConfigError that names the first row
    that cannot be read, or if there is no row.
    """
    path = str(source) if isinstance(source, str | PathLike) else None
    if path == "":
        fix = f"name a JSONL file whose lines are {form}"
        raise ConfigError("not set", field=field, fix=fix)
    rows = _of_items(source, field, form) if path is None else _of_file(path, field, form)
    count = 0
    for row in rows:
        yield row
        count += 1
    if not count:
        name = path or f"the {type(source).__name__}"
        fix = f"each line should be a JSON object {form}"
        raise ConfigError(f"{name} is empty", field=field, fix=fix)


def _of_file(path: str, field: str, form: str) -> Iterator[Row]:
    try:
        with open(path, "rb") as lines:
            for number, raw in enumerate(lines, start=1):
                if number % EVERY == 0:
                    tell_progress(f"read {number:,} lines of {path}")
                where = f"{field}: {path} line {number}"
                if number == 1 and raw[:2] in OTHER_BOMS:
                    problem = f"{where}: not JSON: the file is {OTHER_BOMS[raw[:2]]}"
                    raise ConfigError(problem, field=field, fix="save it as UTF-8")
                if number == 1:
                    raw = raw.removeprefix(BOM)
                if raw.strip():
                    yield _row(where, number, _parsed(where, raw, field), form, field)
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path!r}", field=field) from None
    except OSError as error:  # a folder, no permission, a broken disk
        raise ConfigError(f"{path!r} cannot be read: {error.strerror}", field=field) from None


def _of_items(source: Any, field: str, form: str) -> Iterator[Row]:
    nested = type(source).__module__.partition(".")[0] == "datasets"
    if isinstance(source, Mapping) or not isinstance(source, Iterable):
        fix = f"take one of its splits, {', '.join(map(str, source))}" if nested else "give rows"
        raise ConfigError(f"a {type(source).__name__} has no rows", field=field, fix=fix)
    for number, value in enumerate(source):
        if number and number % EVERY == 0:
            tell_progress(f"read {number:,} rows of {field}")
        row = _row(f"{field}: row {number}", number, value, form, field)
        yield replace(row, value=without_nulls(row.value)) if nested else row


def _parsed(where: str, raw: bytes, field: str) -> Any:
    try:
        return json.loads(raw.decode())
    except UnicodeDecodeError as error:
        problem = f"{where}: not JSON: {error}"
        raise ConfigError(problem, field=field, fix="save the file as UTF-8") from None
    except (ValueError, RecursionError) as error:  # also if nested too deep
        raise ConfigError(f"{where}: not JSON: {error}", field=field) from None


def _row(where: str, line: int, value: Any, form: str, field: str) -> Row:
    if not isinstance(value, Mapping):
        problem = f"{where}: not a JSON object{_given(value)}"
        raise ConfigError(problem, field=field, fix=f"write {form}")
    return Row(where, line, value, field)


def without_nulls(value: Any) -> Any:
    """Return ``value`` without keys that are null in any object within it."""
    if isinstance(value, Mapping):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [without_nulls(each) for each in value]
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
