"""Files that grow line by line, read from where the last read ended."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rl.host.disk import end_of

BLOCK = 1 << 25
"""Bytes of lines that are read at once."""
KEPT = 256
"""Bytes before the offset that must still be there; otherwise the file was rewritten."""


class Lines:
    """Whole lines of a file, each of them once; an incomplete last line waits for its end."""

    def __init__(self, path: Path):
        self.path = path
        self.offset = 0
        """End of the lines that were read, in bytes."""
        self._before = b""

    def new(self, forget: Callable[[], None]) -> Iterator[tuple[bytes, int]]:
        """Yield the lines since the last call, each with the offset of its end in bytes.

        If the file was cut or rewritten since, ``forget`` is called, and the lines begin at the
        start of the file.
        """
        while True:
            begin = self.offset
            was_cut, data = self._read()
            if was_cut:
                forget()
                begin = 0
            if not data:
                return
            for line in data.splitlines(keepends=True):
                begin += len(line)
                yield line, begin

    def _read(self) -> tuple[bool, bytes]:
        """Return whether the file was cut or rewritten, and the next whole lines, about BLOCK bytes
        of them.
        """
        was_cut = self.offset > 0
        data = b""
        try:
            with open(self.path, "rb") as file:
                file.seek(self.offset - len(self._before))
                was_cut = file.read(len(self._before)) != self._before
                file.seek(0 if was_cut else self.offset)
                data = part = file.read(BLOCK)
                while len(part) == BLOCK and b"\n" not in part:
                    part = file.read(BLOCK)
                    data += part
        except OSError:
            data = b""
        if was_cut:
            self.offset = 0
            self._before = b""
        data = data[: data.rfind(b"\n") + 1]
        self.offset += len(data)
        self._before = (self._before + data[-KEPT:])[-KEPT:]
        return was_cut, data


def row_of(line: bytes) -> dict[str, Any] | None:
    """Return the object of a line; None if the line has none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def read_json(path: Path) -> Any:
    """Return the content of a file; None if the file is missing or damaged."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def rows_between(path: Path, begin: int, end: int) -> Iterator[dict[str, Any]]:
    """Yield the objects of the lines from offset ``begin`` to ``end``, in bytes."""
    try:
        with open(path, "rb") as file:
            file.seek(begin)
            data = file.read(end - begin)
    except OSError:
        return
    for line in data.splitlines():
        if (row := row_of(line)) is not None:
            yield row


def tail_of(path: Path, size: int) -> str:
    """Return the last ``size`` bytes of a file as text, from the begin of a line on."""
    try:
        data = end_of(path, size + 1)
    except OSError:
        return ""
    if len(data) > size:
        data = data[data.find(b"\n") + 1 :]
    return data.decode(errors="replace")
