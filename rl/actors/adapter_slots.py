"""AdapterSlots: which adapters a generator holds beside its weights."""

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(slots=True, eq=False)
class _Loaded:
    """An adapter that the generator holds."""

    number: int
    place: int
    users: int = 0


class AdapterSlots:
    """Places of one generator for adapters. ::

        slots = AdapterSlots(4, load)       # load(number, place, folder) brings an adapter there
        async with slots.of(folder) as number:
            ...     # the generator holds the adapter, as ``number``, while the block runs

    - An adapter that no block uses makes room, the one used least recently first.
    - A block without room waits, and later blocks wait behind it, so that it gets room.
    """

    def __init__(self, count: int, load: Callable[[int, int, Path], Awaitable[object]]):
        self._load = load
        self._free = [*range(count)]
        self._loaded: OrderedDict[Path, _Loaded] = OrderedDict()  # the last used last
        self._numbers = itertools.count(1)
        self._order = asyncio.Lock()  # fair
        self._left = asyncio.Event()

    @asynccontextmanager
    async def of(self, folder: Path | None) -> AsyncIterator[int]:
        """Have the generator hold the snapshot in a folder while the block runs; yield its number,
        0 for None. Raises the error of its load.
        """
        if folder is None:
            yield 0
            return
        async with self._order:
            loaded = self._loaded.pop(folder, None) or await self._bring(folder)
            self._loaded[folder] = loaded
            loaded.users += 1
        try:
            yield loaded.number
        finally:
            loaded.users -= 1
            self._left.set()

    async def _bring(self, folder: Path) -> _Loaded:
        while not self._free:
            unused = (name for name, adapter in self._loaded.items() if not adapter.users)
            if (oldest := next(unused, None)) is not None:
                self._free.append(self._loaded.pop(oldest).place)
                break
            self._left.clear()
            await self._left.wait()
        loaded = _Loaded(next(self._numbers), self._free.pop())
        try:
            await self._load(loaded.number, loaded.place, folder)
        except BaseException:
            self._free.append(loaded.place)
            raise
        return loaded
