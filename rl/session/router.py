"""Router: sends requests to generators."""

from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count

from rl.actors.generator import GeneratorMesh
from rl.observe.spans import Stopwatch
from rl.session.concurrency import Signal
from rl.session.recovery import unless_lost
from rl.types import Completion, GenerationRequest

AFFINITIES = 4096  # number of affinities, the latest ones, with a known generator


Resident = Callable[[], AbstractAsyncContextManager[None]]
"""Returns a context manager that keeps the generators on their devices."""


@dataclass(slots=True, eq=False)
class _Replica:
    mesh: GeneratorMesh
    load: int = 0
    """Requests in flight."""
    turn: int = 0
    """Grows each time that the replica is chosen; no two replicas have the same."""


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
        self._replicas: dict[GeneratorMesh, _Replica] = {}
        # By load and turn, so that a choice does not look at every replica. A replica that changes
        # gets a new entry; its old entries are skipped.
        self._heap: list[tuple[int, int, int, _Replica]] = []
        self._count = count()
        self._homes: OrderedDict[object, GeneratorMesh] = OrderedDict()
        self._changed = Signal()
        self.served: Counter[GeneratorMesh] = Counter()
        """Number of completions of each generator, since the caller last removed its entry."""

    def join(self, mesh: GeneratorMesh) -> None:
        """Start to send requests to ``mesh``."""
        self._replicas[mesh] = _Replica(mesh, turn=next(self._count))
        self._sort(self._replicas[mesh])
        self._changed.notify()

    def leave(self, mesh: GeneratorMesh) -> None:
        """Send no more requests to ``mesh``. Requests in flight may still be answered."""
        self._replicas.pop(mesh, None)

    async def drain(self, mesh: GeneratorMesh) -> None:
        """Like ``leave``, and wait until no request is in flight."""
        if replica := self._replicas.pop(mesh, None):
            await self._changed.until(lambda: not replica.load)

    def __contains__(self, mesh: GeneratorMesh) -> bool:
        """Return whether ``mesh`` gets requests."""
        return mesh in self._replicas

    async def generate(
        self, requests: list[GenerationRequest], *, affinity: object = None, alone: bool = False
    ) -> list[Completion]:
        """Return completions in the order of ``requests``, all of one generator.

        With ``alone``, an idle generator drops its cached prefixes and serves only this call, so
        that completions depend only on requests and weights. Otherwise the way requests are batched
        affects how sums are rounded, and sometimes which token is drawn.
        """
        while True:
            # With ``alone``, requests wait for an idle generator.
            await self._changed.until(
                lambda: (least := self._least_loaded()) and not (alone and least.load)
            )
            replica = self._choose(affinity)
            replica.load += len(requests)
            self._sort(replica)
            try:
                async with self.resident():
                    with self._watch.span("generate", replica.mesh.name):
                        answer = replica.mesh.generate(requests, fresh=alone)
                        completions = await unless_lost(replica.mesh, answer)
                if completions is not None:
                    self.served[replica.mesh] += len(completions)
                    return completions
                if self._replicas.get(replica.mesh) is replica:  # it has not joined again since
                    self.leave(replica.mesh)
            finally:
                replica.load -= len(requests)
                self._sort(replica)
                self._changed.notify()

    def _choose(self, affinity: object) -> _Replica:
        """Return the replica that answered ``affinity`` before, or else the least loaded one.

        Among equally loaded replicas, return the least recently chosen one.
        """
        home = self._replicas.get(self._homes.pop(affinity)) if affinity in self._homes else None
        replica = home or self._least_loaded()
        assert replica is not None, "requests wait for a generator"
        replica.turn = next(self._count)
        if affinity is not None:
            self._homes[affinity] = replica.mesh
            if len(self._homes) > AFFINITIES:
                self._homes.popitem(last=False)
        return replica

    def _least_loaded(self) -> _Replica | None:
        """Return the least loaded replica, the least recently chosen one of equals."""
        while self._heap:
            load, turn, _, replica = self._heap[0]
            is_here = self._replicas.get(replica.mesh) is replica
            if is_here and (load, turn) == (replica.load, replica.turn):
                return replica
            heappop(self._heap)
        return None

    def _sort(self, replica: _Replica) -> None:
        """Give ``replica`` an entry for its load and turn."""
        heappush(self._heap, self._entry(replica))
        if len(self._heap) > 4 * len(self._replicas) + 64:  # most entries are old
            self._heap = [self._entry(each) for each in self._replicas.values()]
            heapify(self._heap)

    def _entry(self, replica: _Replica) -> tuple[int, int, int, _Replica]:
        return replica.load, replica.turn, next(self._count), replica
