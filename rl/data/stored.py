"""Sequences of more items than memory holds."""

import os
import pickle
import tempfile
from array import array
from collections.abc import Iterable, Sequence
from copy import copy
from itertools import compress
from operator import not_
from pathlib import Path
from typing import Any, TypeVar

from rl.data.sources import Sets, Table

Item = TypeVar("Item")


class Stored(Sequence[Item]):
    """Items in a file without a name, which ends with the process. Memory holds their places.

    An item is made again each time that it is asked for. A slice is as small as its places.
    """

    def __init__(self, items: Iterable[Item], folder: Path):
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (open as long as the items)
        self._ends = array("Q", [0])
        for item in items:
            self._ends.append(self._ends[-1] + self._file.write(pickle.dumps(item)))
        self._file.flush()
        self._places: Sequence[int] = range(len(self._ends) - 1)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return self.at(range(len(self))[index])
        place = self._places[index]
        start, end = self._ends[place : place + 2]
        return pickle.loads(os.pread(self._file.fileno(), end - start, start))

    def at(self, indices: Iterable[int]) -> "Stored[Item]":
        """Return the items at ``indices``."""
        part = copy(self)
        part._places = array("Q", (self._places[index] for index in indices))
        return part


def kept(items: Iterable[Item], source: Any) -> Sequence[Item]:
    """Return ``items``: stored beside the cache of ``datasets`` if they come from a table that is
    mapped into memory, else as a list.
    """
    if not (isinstance(source, Table | Sets) and source.is_mapped):
        return [*items]
    from datasets.config import HF_DATASETS_CACHE

    os.makedirs(HF_DATASETS_CACHE, exist_ok=True)
    return Stored(items, HF_DATASETS_CACHE)


def parted(items: Sequence[Item], flags: Sequence[bool]) -> tuple[Sequence[Item], Sequence[Item]]:
    """Return the items whose flags are False, and those whose flags are True."""
    if isinstance(items, Stored):
        first, second = parted(range(len(items)), flags)
        return items.at(first), items.at(second)
    return [*compress(items, map(not_, flags))], [*compress(items, flags)]
