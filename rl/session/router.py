"""Which generator answers which requests."""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from rl.errors import RankLost
from rl.session.concurrency import Signal
from rl.types import Completion, GenerationRequest

AFFINITIES = 4096  # of which the generator is remembered: the latest


class Replica(Protocol):
    """A generator that can be asked. Every call raises ActorFailure once it is lost."""

    async def generate(
        self, requests: list[GenerationRequest], *, fresh: bool = False
    ) -> list[Completion]: ...


Resident = Callable[[], AbstractAsyncContextManager[None]]
"""Returns a context manager that keeps the generators on their devices."""


@dataclass(slots=True, eq=False)
class _Place:
    replica: Replica
    load: int = 0
    """Requests in flight."""


class Router:
    """Sends requests to the generator that has their prefixes cached, else to the least loaded.

    What a lost generator had in flight is sent again to another; while there is none, requests wait
    for one to join. ::

        router.join(generator)
        completions = await router.generate(requests, affinity="train/7")
    """

    def __init__(self, resident: Resident = nullcontext) -> None:
        self.resident = resident
        self._places: dict[Replica, _Place] = {}
        self._homes: dict[object, Replica] = {}
        self._changed = Signal()
        self.served: Counter[Replica] = Counter()
        """Completions of each generator; whoever reads a number may take it away."""

    def join(self, replica: Replica) -> None:
        """From now on it is sent requests."""
        self._places[replica] = _Place(replica)
        self._changed.notify()

    def leave(self, replica: Replica) -> None:
        """From now on it is not; what it has in flight it may still answer."""
        self._places.pop(replica, None)

    async def drain(self, replica: Replica) -> None:
        """``leave``, and wait until it has answered what it has in flight."""
        if place := self._places.pop(replica, None):
            await self._changed.until(lambda: not place.load)

    @property
    def replicas(self) -> list[Replica]:
        """Those that are sent requests."""
        return list(self._places)

    async def generate(
        self, requests: list[GenerationRequest], *, affinity: object = None, alone: bool = False
    ) -> list[Completion]:
        """Return completions in the order of ``requests``, all of one generator.

        ``alone`` asks a generator that does nothing else meanwhile and forgets cached prefixes, so
        that the completions depend on requests and weights alone: how requests are batched decides
        how sums are rounded, and with that, now and then, a token.
        """
        while True:
            await self._changed.until(
                lambda: any(not (alone and place.load) for place in self._places.values())
            )
            place = self._choose(affinity)
            place.load += len(requests)
            try:
                async with self.resident():
                    completions = await place.replica.generate(requests, fresh=alone)
                self.served[place.replica] += len(completions)
                return completions
            except RankLost:
                if self._places.get(place.replica) is place:  # and not its next incarnation
                    self.leave(place.replica)
            finally:
                place.load -= len(requests)
                self._changed.notify()

    def _choose(self, affinity: object) -> _Place:
        """Return the place that answered ``affinity`` before, else the least loaded one.

        Of several, it is the one that was not chosen for longest.
        """
        home = self._places.get(self._homes.pop(affinity)) if affinity in self._homes else None
        place = home or min(self._places.values(), key=lambda each: each.load)
        self._places[place.replica] = self._places.pop(place.replica)  # to the end
        if affinity is not None:
            self._homes[affinity] = place.replica
            if len(self._homes) > AFFINITIES:
                del self._homes[next(iter(self._homes))]
        return place
