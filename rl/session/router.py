"""Router: sends requests to generators."""

from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count

from rl.actors.generator import GeneratorMesh
from rl.errors import RankLost
from rl.observe.spans import Stopwatch
from rl.session.concurrency import Signal
from rl.types import Completion, GenerationRequest

AFFINITIES = 4096  # number of affinities, the latest ones, with a known generator


Resident = Callable[[], AbstractAsyncContextManager[None]]
"""Returns a context manager that keeps the generators on their devices."""


@dataclass(slots=True, eq=False)
class _Place:
    replica: GeneratorMesh
    load: int = 0
    """Requests in flight."""
    turn: int = 0
    """Grows each time that the place is chosen; no two places have the same."""


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
        self._places: dict[GeneratorMesh, _Place] = {}
        # By load and turn, so that a choice does not look at every place. A place that changes gets
        # a new entry; its old entries are skipped.
        self._heap: list[tuple[int, int, int, _Place]] = []
        self._count = count()
        self._homes: OrderedDict[object, GeneratorMesh] = OrderedDict()
        self._changed = Signal()
        self.served: Counter[GeneratorMesh] = Counter()
        """Number of completions of each generator, since the caller last removed its entry."""

    def join(self, replica: GeneratorMesh) -> None:
        """Start to send requests to ``replica``."""
        self._places[replica] = _Place(replica, turn=next(self._count))
        self._sort(self._places[replica])
        self._changed.notify()

    def leave(self, replica: GeneratorMesh) -> None:
        """Send no more requests to ``replica``. Requests in flight may still be answered."""
        self._places.pop(replica, None)

    async def drain(self, replica: GeneratorMesh) -> None:
        """Like ``leave``, and wait until no request is in flight."""
        if place := self._places.pop(replica, None):
            await self._changed.until(lambda: not place.load)

    @property
    def replicas(self) -> list[GeneratorMesh]:
        """Generators that get requests."""
        return list(self._places)

    def __contains__(self, replica: GeneratorMesh) -> bool:
        """Return whether ``replica`` gets requests."""
        return replica in self._places

    async def generate(
        self, requests: list[GenerationRequest], *, affinity: object = None, alone: bool = False
    ) -> list[Completion]:
        """Return completions in the order of ``requests``, all of one generator.

        With ``alone``, an idle generator drops its cached prefixes and serves only this call, so
        that completions depend only on requests and weights. Otherwise the way requests are batched
        affects how sums are rounded, and sometimes which token is drawn.
        """
        while True:
            await self._changed.until(lambda: self._has_room(alone))
            place = self._choose(affinity)
            place.load += len(requests)
            self._sort(place)
            try:
                async with self.resident():
                    with self._watch.span("generate", place.replica.name):
                        completions = await place.replica.generate(requests, fresh=alone)
                self.served[place.replica] += len(completions)
                return completions
            except RankLost:
                if self._places.get(place.replica) is place:  # it has not joined again since
                    self.leave(place.replica)
            finally:
                place.load -= len(requests)
                self._sort(place)
                self._changed.notify()

    def _choose(self, affinity: object) -> _Place:
        """Return the place that answered ``affinity`` before, or else the least loaded one.

        Among equally loaded places, return the least recently chosen one.
        """
        home = self._places.get(self._homes.pop(affinity)) if affinity in self._homes else None
        place = home or self._least_loaded()
        assert place is not None, "requests wait for a generator"
        place.turn = next(self._count)
        if affinity is not None:
            self._homes[affinity] = place.replica
            if len(self._homes) > AFFINITIES:
                self._homes.popitem(last=False)
        return place

    def _has_room(self, alone: bool) -> bool:
        """Whether a generator can be asked now: an idle one with ``alone``."""
        place = self._least_loaded()
        return place is not None and not (alone and place.load)

    def _least_loaded(self) -> _Place | None:
        """Return the least loaded place, the least recently chosen one of equals."""
        while self._heap:
            load, turn, _, place = self._heap[0]
            if self._places.get(place.replica) is place and (load, turn) == (
                place.load,
                place.turn,
            ):
                return place
            heappop(self._heap)
        return None

    def _sort(self, place: _Place) -> None:
        """Give ``place`` an entry for its load and turn."""
        heappush(self._heap, self._entry(place))
        if len(self._heap) > 4 * len(self._places) + 64:  # most entries are old
            self._heap = [self._entry(each) for each in self._places.values()]
            heapify(self._heap)

    def _entry(self, place: _Place) -> tuple[int, int, int, _Place]:
        return place.load, place.turn, next(self._count), place
