"""Which generator answers which requests."""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from rl.controller.concurrency import Signal
from rl.errors import ActorFailure
from rl.types import Completion, GenerationRequest

SESSIONS = 4096  # whose generators are remembered: the latest


class Replica(Protocol):
    """A generator that can be asked. Every call raises ActorFailure once it is lost."""

    async def generate(
        self, requests: list[GenerationRequest], *, fresh: bool = False
    ) -> list[Completion]: ...


Turn = Callable[[], AbstractAsyncContextManager[None]]
"""Generators have their devices for as long as a block under what it gives runs."""


@dataclass(slots=True, eq=False)
class _Place:
    replica: Replica
    load: int = 0
    """Requests in flight."""


class Router:
    """Sends requests to the generator with the fewest in flight; a session's to the one that has
    its prefixes cached.

    What a lost generator had in flight is sent again to another; while there is none, requests wait
    for one to join. ::

        router.join(generator)
        completions = await router.generate(requests, session="train/7")
    """

    def __init__(self, turn: Turn = nullcontext) -> None:
        self._turn = turn
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
        self, requests: list[GenerationRequest], *, session: object = None
    ) -> list[Completion]:
        """Completions in the order of ``requests``, all of one generator."""
        return await self._ask(requests, session, alone=False)

    async def generate_alone(self, requests: list[GenerationRequest]) -> list[Completion]:
        """``generate`` by a generator that does nothing else meanwhile and has seen nothing else.

        So the completions depend on requests and weights alone: on how requests are batched depends
        how sums are rounded, and with that, now and then, a token.
        """
        return await self._ask(requests, None, alone=True)

    async def _ask(
        self, requests: list[GenerationRequest], session: object, *, alone: bool
    ) -> list[Completion]:
        while True:
            await self._changed.until(
                lambda: any(not (alone and place.load) for place in self._places.values())
            )
            place = self._choose(session)
            place.load += len(requests)
            try:
                async with self._turn():
                    completions = await place.replica.generate(requests, fresh=alone)
                self.served[place.replica] += len(completions)
                return completions
            except ActorFailure as failure:
                if not failure.is_lost:
                    raise
                if self._places.get(place.replica) is place:  # and not its next incarnation
                    self.leave(place.replica)
            finally:
                place.load -= len(requests)
                self._changed.notify()

    def _choose(self, session: object) -> _Place:
        """The session's own, else the least loaded, and of these the one that was not chosen for
        longest.
        """
        home = self._places.get(self._homes.pop(session)) if session in self._homes else None
        place = home or min(self._places.values(), key=lambda each: each.load)
        self._places[place.replica] = self._places.pop(
            place.replica
        )  # to the end: ties are rotated
        if session is not None:
            self._homes[session] = place.replica
            if len(self._homes) > SESSIONS:
                del self._homes[next(iter(self._homes))]
        return place
