"""Router: sends requests to generators."""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from heapq import heappop, heappush
from itertools import count
from pathlib import Path

from rl.actors.generator import GeneratorMesh
from rl.errors import RankLost
from rl.observe.spans import Stopwatch
from rl.session.concurrency import Signal
from rl.types import Completion, GenerationRequest, Part

AFFINITIES = 4096  # number of affinities, the latest ones, with a known generator
SHORT = 64  # entries of a heap that is not worth to be cleared of old ones

OnTokens = Callable[[Part], None]
Resident = Callable[[], AbstractAsyncContextManager[None]]
"""Returns a context manager that keeps the generators on their devices."""


class Router:
    """Sends requests to the generator that has their prefixes cached, or else the least loaded.

    Requests of a lost generator are sent again to another one. Without generators, requests wait
    until one joins. ::

        router.join(generator)
        completions = await router.generate(requests, affinity="train/7")
    """

    def __init__(self, resident: Resident = nullcontext, watch: Stopwatch | None = None) -> None:
        self.resident = resident
        self._watch = watch or Stopwatch()
        # By load and turn, so that a choice does not look at every generator. A generator that
        # changes gets a new entry; its old entries are skipped.
        self._heap: list[tuple[int, int, int, GeneratorMesh]] = []
        self._longest = SHORT
        self._count = count()
        self._homes: OrderedDict[object, GeneratorMesh] = OrderedDict()
        self._changed = Signal()

    def join(self, generator: GeneratorMesh) -> None:
        """Start to send requests to ``generator``."""
        generator.state = "serving"
        generator.turn = next(self._count)
        self._sort(generator)
        self._changed.notify()

    async def drain(self, generator: GeneratorMesh) -> None:
        """Send no more requests to ``generator``, and wait until none is in flight."""
        generator.state = "leaving"
        await self._changed.until(lambda: not generator.load)

    async def generate(
        self,
        requests: list[GenerationRequest],
        *,
        affinity: object = None,
        alone: bool = False,
        adapter: Path | None = None,
        on_tokens: OnTokens | None = None,
    ) -> list[Completion]:
        """Return completions in the order of ``requests``, all of one generator.

        With ``alone``, an idle generator drops its cached prefixes and serves only this call, so
        that completions depend only on requests and weights. Otherwise the way requests are batched
        affects how sums are rounded, and sometimes which token is drawn. ``adapter``: the snapshot
        that the generator samples with beside its weights. ``on_tokens``: see ``Session.sample``.
        """
        while True:
            # With ``alone``, requests wait for an idle generator.
            await self._changed.until(
                lambda: (least := self._least_loaded()) and not (alone and least.load)
            )
            generator = self._choose(affinity)
            generator.load += len(requests)
            self._sort(generator)
            try:
                async with self.resident():
                    with self._watch.span("generate", generator.name):
                        completions = await generator.generate(
                            requests, fresh=alone, adapter=adapter, on_tokens=on_tokens
                        )
                generator.has_answered = True
                return completions
            except RankLost as lost:
                if lost.actor != generator.name:
                    raise
            finally:
                generator.load -= len(requests)
                self._sort(generator)
                self._changed.notify()

    def _choose(self, affinity: object) -> GeneratorMesh:
        """Return the generator that answered ``affinity`` before, or else the least loaded one.

        Among equally loaded generators, return the least recently chosen one.
        """
        home = self._homes.pop(affinity, None) if affinity is not None else None
        generator = home if home is not None and home.is_serving else self._least_loaded()
        assert generator is not None, "requests wait for a generator"
        generator.turn = next(self._count)
        if affinity is not None:
            self._homes[affinity] = generator
            if len(self._homes) > AFFINITIES:
                self._homes.popitem(last=False)
        return generator

    def _least_loaded(self) -> GeneratorMesh | None:
        """Return the least loaded generator, the least recently chosen one of equals."""
        while self._heap and not _is_current(self._heap[0]):
            heappop(self._heap)
        return self._heap[0][-1] if self._heap else None

    def _sort(self, generator: GeneratorMesh) -> None:
        """Give ``generator`` an entry for its load and turn."""
        entry = (generator.load, generator.turn, next(self._count), generator)
        heappush(self._heap, entry)
        if len(self._heap) > self._longest:  # most entries are old
            self._heap = sorted(filter(_is_current, self._heap))
            self._longest = 4 * len(self._heap) + SHORT


def _is_current(entry: tuple[int, int, int, GeneratorMesh]) -> bool:
    load, turn, _, generator = entry
    return generator.is_serving and (load, turn) == (generator.load, generator.turn)
