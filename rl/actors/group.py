"""Actors of one role, called rank by rank; every call has a deadline and fails by name."""

import asyncio
import contextlib
import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, Protocol

from monarch.actor import Actor, ActorError, ProcMesh, concurrent_endpoint
from torch.distributed import TCPStore

from rl.actors.processes import Process, stop_procs
from rl.actors.supervisor import Supervisor
from rl.compat.torch_rendezvous import EXISTING_STORE
from rl.errors import ActorFailure, RankLost, RunError
from rl.platform import memory_domain
from rl.types import Place

CHECK_ALIVE_S = (
    30.0  # what raises may do so because a peer died: of one on another host nobody tells sooner
)
STOP_S = 5.0  # for Monarch and the kernel to see that killed processes have ended
REMOTE_STOP_S = 30.0  # for Monarch where nobody else can end them; it asks those that hang for 20 s

PerRank = Mapping[int, Sequence[Any]]
"""Arguments of the ranks that are called."""

_incarnations = itertools.count()


class Deadlines(Protocol):
    """How long anything is waited for, in seconds."""

    start: float
    call: float
    heartbeat: float
    reward: float


def outlasting(deadlines: Deadlines) -> float:
    """Seconds after which a collective gives up: later than any call, whose deadline names the rank
    that is silent.
    """
    return deadlines.start + deadlines.call


class Heartbeat(Actor):
    """Lives beside each rank's actor, and answers also while that one is being built or is busy."""

    @concurrent_endpoint
    async def heartbeat(self) -> tuple[str, int]:
        return memory_domain(), os.getpid()

    @concurrent_endpoint
    async def leave(self) -> None:
        os._exit(0)

    @concurrent_endpoint
    async def open_store(self) -> int:
        """Open the store of torch.distributed in this process, which holds its port until it ends;
        return the port.
        """
        self._store = TCPStore(os.environ["MASTER_ADDR"], 0, is_master=True, wait_for_workers=False)
        return self._store.port

    @concurrent_endpoint
    async def meet_at(self, port: int) -> None:
        """Have torch.distributed connect to that store.

        It would open one by itself, at a port that may be taken.
        """
        os.environ |= {"MASTER_PORT": str(port), **EXISTING_STORE}


class ActorGroup:
    """The ranks of one role, from ``spawn`` to ``stop``. Every call ends: with results, or an
    ActorFailure.

    What an endpoint raises is the failure of that call. A rank that died, or gave no answer in
    time, is the failure of the group: all its calls, pending and later ones, raise that first
    failure. ::

        group = ActorGroup("trainer", supervisor, heartbeat=60.0)
        await group.spawn(PolicyTrainer, Place(ranks=2), config, deadline=600.0)
        answers = await group.call("forward", batch, deadline=600.0)
        await group.stop()      # another of the same name can be spawned after it
    """

    def __init__(self, name: str, supervisor: Supervisor, *, heartbeat: float = 0.0):
        self.name = name
        self.ranks = 0
        self.port = 0
        self._place = Place(ranks=1)
        # Monarch tells of a death when the next of this name may be up
        self._mesh = f"{name}-{next(_incarnations)}"
        self._supervisor = supervisor
        self._hosts = supervisor.hosts
        self._heartbeat = heartbeat
        self._procs: ProcMesh | None = None
        self._processes: list[Process] = []
        self._elsewhere: list[int] = []
        self._background: list[asyncio.Task[None]] = []
        self._doing: dict[int, list[str]] = {}

    # Futures belong to the loop that first asks for them, not to one that runs at construction.

    @cached_property
    def _failed(self) -> asyncio.Future[ActorFailure]:
        return asyncio.get_running_loop().create_future()

    @cached_property
    def _over(self) -> asyncio.Future[ActorFailure]:
        """Done if it failed or was stopped."""
        return asyncio.get_running_loop().create_future()

    async def spawn(
        self,
        actor: type[Actor],
        place: Place,
        *args: Any,
        deadline: float,
        env: dict[str, str] | None = None,
        meet: bool = True,
    ) -> None:
        """Start processes in ``place``, with ``env`` on top of their hosts', and ``actor(*args)``
        in each.

        ``meet``: whether they can open process groups of torch.distributed.
        """
        self.ranks = place.ranks
        self._place = place
        self._doing = {rank: [] for rank in range(place.ranks)}
        everyone: PerRank = dict.fromkeys(range(place.ranks), ())
        self._supervisor.register(self._mesh, self._died)
        self._procs = self._hosts.spawn(self.name, place, env=env or {})
        self._pulse = self._procs.spawn(self._mesh, Heartbeat)
        for rank, (domain, pid) in enumerate(
            await self._answers(self._pulse, "heartbeat", everyone, deadline)
        ):
            if domain != memory_domain():
                self._elsewhere.append(rank)
            else:
                with contextlib.suppress(ProcessLookupError):  # it died just now: Monarch will tell
                    self._processes.append(Process(pid, partial(self._died, rank)))
        if meet:
            (self.port,) = await self._answers(self._pulse, "open_store", {0: ()}, deadline)
            await self._answers(
                self._pulse, "meet_at", dict.fromkeys(everyone, (self.port,)), deadline
            )
        self._actor = self._procs.spawn(self._mesh, actor, *args)
        if self._heartbeat:
            self._background.append(asyncio.create_task(self._beat()))

    async def call(
        self, endpoint: str, *args: Any, deadline: float, rank: int | None = None
    ) -> list[Any]:
        """``endpoint`` of every rank, or of one; results in rank order.

        The first rank to fail ends the call.
        """
        ranks = range(self.ranks) if rank is None else [rank]
        return await self.call_each(endpoint, dict.fromkeys(ranks, args), deadline=deadline)

    async def call_each(self, endpoint: str, args: PerRank, *, deadline: float) -> list[Any]:
        """``endpoint`` of the given ranks, each with arguments of its own."""
        if self._over.done():
            raise self._over.result().with_traceback(None)
        for rank in args:
            self._doing[rank].append(endpoint)
        try:
            return await self._answers(self._actor, endpoint, args, deadline)
        finally:
            for rank in args:
                self._doing[rank].remove(endpoint)

    def watch(self, endpoint: str) -> None:
        """Call ``endpoint``, which returns when the rank is closed; if it raises, the group has
        failed.
        """

        async def watched() -> None:
            try:
                await self.call(endpoint, deadline=math.inf)
            except ActorFailure as failure:
                self._fail(failure)

        self._background.append(asyncio.create_task(watched()))

    async def check_alive(self, within_s: float | None = None) -> None:
        """Return when every rank has given one.

        Raises the group's failure, which it is too if one gives none.
        """
        deadline = within_s or max(CHECK_ALIVE_S, self._heartbeat)
        await self._answers(
            self._pulse, "heartbeat", dict.fromkeys(range(self.ranks), ()), deadline
        )

    async def failed(self) -> ActorFailure:
        """The group's failure, once there is one."""
        return await asyncio.shield(self._failed)

    @property
    def is_over(self) -> bool:
        """Whether it failed, or was stopped."""
        return self._over.done()

    async def stop(self) -> None:
        """End the processes, whatever they are doing, and whatever waits for them.

        Raises nothing.
        """
        self._supervisor.forget(self._mesh)
        if not self._over.done():
            self._over.set_result(self._failure([0], "stop", "died", "it was stopped"))
        for task in self._background:
            task.cancel()
        for process in (
            self._processes
        ):  # Monarch would wait for their interpreters to end, and for those that hang
            process.kill()
        for rank in self._elsewhere:
            with contextlib.suppress(Exception):  # it is gone
                self._pulse.slice(**self._hosts.coordinates(self._place, rank)).leave.broadcast()
        procs = self._procs
        self._procs = None
        await stop_procs(procs, deadline=REMOTE_STOP_S if self._elsewhere else STOP_S)
        if ends := [process.ended for process in self._processes]:
            await asyncio.wait(ends, timeout=STOP_S)

    def _died(self, rank: int, reason: str = "") -> None:
        """Fail as the death of a rank's process, with what its log ended on."""
        during = self._doing[rank][-1] if self._doing[rank] else "between calls"
        log = self._hosts.logs / f"{self.name}-{rank}.log"
        why = (
            reason.partition("\n")[2].strip() or reason
        )  # Monarch's first line names its own meshes
        self._fail(
            self._failure(
                [rank], during, "died", f"the process died{why and ': ' + why}\n{_tail(log)}"
            )
        )

    def _fail(self, failure: ActorFailure) -> None:
        if not self._over.done():
            self._over.set_result(failure)
            self._failed.set_result(failure)

    def _failure(
        self, ranks: Iterable[int], call: str, kind: Literal["died", "silent", "raised"], what: str
    ) -> ActorFailure:
        first, *others = sorted(ranks)
        named = f"ranks {', '.join(map(str, [first, *others]))}" if others else f"rank {first}"
        node = self._hosts.name_of(self._place, first)
        where = f" on {node}" if node else ""
        failure = ActorFailure if kind == "raised" else RankLost
        return failure(
            f"{self.name} {named}{where}, {call}: {what}",
            actor=self.name,
            rank=first,
            call=call,
            kind=kind,
        )

    async def _beat(self) -> None:
        with contextlib.suppress(ActorFailure):  # whoever waits for the group is told
            while True:
                await asyncio.sleep(self._heartbeat / 3)
                await self.check_alive(self._heartbeat)

    async def _answers(
        self, actor: Any, endpoint: str, args: PerRank, deadline: float
    ) -> list[Any]:
        """Of the given ranks of ``actor``; raises the first failure of the group, or of one of
        them.
        """
        loop = asyncio.get_running_loop()
        tasks = {
            rank: asyncio.ensure_future(self._ask(actor, endpoint, rank, own))
            for rank, own in args.items()
        }
        ends = loop.time() + deadline
        pending = {*tasks.values()}
        try:
            while pending:
                done, _ = await asyncio.wait(
                    {*pending, self._over},
                    timeout=max(0.0, ends - loop.time()),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                pending -= done
                if not done:
                    silent = [rank for rank, task in tasks.items() if task in pending]
                    self._fail(
                        self._failure(
                            silent, endpoint, "silent", f"no answer within {deadline:.0f} s"
                        )
                    )
                answers = [task.result() for task in tasks.values() if task in done]
                raised = [answer for answer in answers if isinstance(answer, ActorFailure)]
                if raised and self.ranks > 1 and actor is not self._pulse:
                    with contextlib.suppress(ActorFailure):  # which is then the group's
                        await self.check_alive()
                if self._over.done():
                    raise self._over.result().with_traceback(None)
                if raised:
                    raise raised[0]
        finally:
            for task in pending:
                task.cancel()
        return [task.result() for task in tasks.values()]

    async def _ask(self, actor: Any, endpoint: str, rank: int, args: Sequence[Any]) -> Any:
        """The rank's answer, or its failure as one."""
        at = self._hosts.coordinates(self._place, rank)
        try:
            return await getattr(actor.slice(**at), endpoint).call_one(*args)
        except ActorError as error:
            cause = error.exception
            named = (
                str(cause) if isinstance(cause, RunError) else f"{type(cause).__name__}: {cause}"
            )
            failure = self._failure([rank], endpoint, "raised", f"{named}\n{error}")
            failure.__cause__ = cause
            return failure
        except (
            RuntimeError,
            ValueError,
        ) as error:  # Monarch's own: nobody is there to answer, or ever was
            self._died(rank, str(error))
            return self._over.result()


class Mesh:
    """What can be started again: every ``start`` makes a group anew."""

    _group: ActorGroup
    _started: bool

    @property
    def is_running(self) -> bool:
        """Whether it was started, and neither lost nor stopped since."""
        return self._started and not self._group.is_over

    async def failed(self) -> ActorFailure:
        """The failure that all calls raise from then on, once there is one; until the next
        ``start``.
        """
        return await self._group.failed()

    async def check_alive(self) -> None:
        """Return if every rank gives one soon; raises the failure if one has died."""
        await self._group.check_alive()


class Startable(Protocol):
    """What ``ensure_running`` takes."""

    @property
    def is_running(self) -> bool: ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


async def ensure_running(mesh: Startable) -> None:
    """Start ``mesh`` unless it is at work; what is left of one that was lost ends first."""
    if not mesh.is_running:
        await mesh.stop()
        await mesh.start()


def _tail(log: Path, lines: int = 20) -> str:
    if not log.is_file():
        return f"{log} was never written"
    return "\n".join([f"end of {log}:", *log.read_text(errors="replace").splitlines()[-lines:]])
