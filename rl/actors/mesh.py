"""Mesh: the controller's handle to the actors of one role, which can be started again."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from monarch.actor import Actor

from rl.actors.endpoint import Endpoint, P, R, Span, T, endpoint
from rl.actors.group import ActorGroup, Ranks
from rl.actors.hosts import Hosts
from rl.errors import ActorFailure
from rl.host import profiler
from rl.host.platform import has_rdma, memory_domain, peak_memory
from rl.model.shards import Layout, Shard, layout_of
from rl.observe.spans import Stopwatch
from rl.types import Place
from rl.types.deadlines import DeadlineConfig

RECORDED_RANKS = 64  # the first ranks of a mesh, whose work is recorded: events grow with the ranks


class Rank(Actor):
    """Rank of a mesh, with an engine in a thread of its own."""

    async def _in_engine(self, call: Callable[..., T], *args: Any) -> T:
        """Call a function in the engine's thread."""
        raise NotImplementedError

    async def _shards(self) -> Sequence[Shard]:
        """Return the parameters of this rank."""
        raise NotImplementedError

    @endpoint
    async def start(self) -> None:
        """Build the engine, so that a failure is an error with a traceback."""

    @endpoint
    async def close(self) -> None:
        """Let the engine finish saves and clean up."""

    @endpoint
    async def layout(self) -> tuple[str, bool, Layout]:
        """Return the memory domain, whether the host has an RDMA device, and the layout."""
        return memory_domain(), has_rdma(), layout_of(await self._shards())

    @endpoint
    async def begin_profile(self, memory: bool) -> None:
        await self._in_engine(profiler.begin_profile, memory)

    @endpoint
    async def end_profile(self, path: Path, memory: bool) -> None:
        await self._in_engine(profiler.end_profile, path, memory)


@dataclass(kw_only=True, eq=False)
class Mesh:
    """Actors of one role, in processes of their own. Every ``start`` makes a new group of them."""

    actor: ClassVar[type[Rank]]
    name: str
    place: Place
    hosts: Hosts
    deadlines: DeadlineConfig
    watch: Stopwatch | None = field(default=None, init=False)
    """Stopwatch that gets the work of the first RECORDED_RANKS ranks, as that of process
    ``NAME[RANK]``."""

    def __post_init__(self) -> None:
        self._renew()

    def _renew(self) -> None:
        heartbeat = self.deadlines.heartbeat
        self._group = ActorGroup(
            self.name, self.place, self.hosts, heartbeat=heartbeat, worked=self._worked
        )
        self._started = False

    def _worked(self, rank: int, work: Span) -> None:
        if self.watch is not None and rank < RECORDED_RANKS:
            self.watch.worked(f"{self.name}[{rank}]", *work)

    def _arguments(self) -> tuple[Any, ...]:
        """Return the arguments of each actor."""
        raise NotImplementedError

    def _environment(self) -> dict[str, str]:
        """Return the environment variables that the processes need."""
        return {}

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.place.ranks

    @property
    def collective_timeout_s(self) -> float:
        """Seconds after which a collective gives up.

        Longer than any call, so that the deadline of the call names the silent rank first.
        """
        return self.deadlines.start + self.deadlines.call

    @property
    def is_running(self) -> bool:
        """Whether the mesh was started, and neither lost nor stopped since."""
        return self._started and not self._group.is_over

    async def start(self) -> None:
        """Spawn the ranks and build their engines; can be called again after ``stop``."""
        self._renew()
        deadline = self.deadlines.start
        arguments = self._arguments()
        env = self._environment()
        await self._group.spawn(self.actor, *arguments, deadline=deadline, env=env)
        await self._group.on(timeout_s=deadline).call(Rank.start)
        self._started = True

    def on(self, rank: int | None = None, *, extra_s: float = 0.0) -> Ranks:
        """Return every rank, or one, to be called. ``extra_s`` is added to the usual deadline."""
        return self._group.on(rank, timeout_s=self.deadlines.call + extra_s)

    async def call(self, endpoint: Endpoint[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call an endpoint of every rank; return results in rank order."""
        return await self.on().call(endpoint, *args, **kwargs)

    async def failed(self) -> ActorFailure:
        """Wait for the failure of the mesh, which all calls raise until the next ``start``."""
        return await self._group.failed()

    async def check_alive(self) -> None:
        """Return if every rank answers a heartbeat soon; raise the mesh's failure otherwise."""
        await self._group.check_alive()

    async def close(self) -> None:
        """Let engines that were built finish saves and clean up; then end the processes."""
        if self._started:
            await self.call(Rank.close)
        await self.stop()

    async def stop(self) -> None:
        """End the processes, whatever they are doing. Raises nothing."""
        await self._group.stop()


def log(text: str) -> None:
    """Write a line with the time to the log of this process."""
    print(f"{time.strftime('%F %T')}  {text}", flush=True)


def log_memory(text: str) -> None:
    """Write a line with the time and the largest memory of this process so far."""
    log(f"{text}; memory at most {peak_memory() / 2**30:.2f} GiB so far")
