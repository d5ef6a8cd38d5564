"""ActorGroup: calls to the actors of one role, with deadlines and failures that name the rank."""

import asyncio
import contextlib
import itertools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Concatenate, Literal

from monarch.actor import Actor, ActorError, ProcMesh
from torch.distributed import TCPStore

from rl.actors.endpoint import A, Endpoint, P, R, Span, Timed, endpoint
from rl.actors.fork_server import LOG
from rl.actors.hosts import Hosts
from rl.actors.processes import Process, stop_procs
from rl.compat.torch_internals import EXISTING_STORE
from rl.errors import ActorFailure, RankLost, RunError, error_text
from rl.host.disk import end_of, shorten
from rl.host.listening import is_loopback, listen
from rl.host.platform import memory_domain, resident_memory
from rl.host.process import oom_kills
from rl.types import Place

# An endpoint may raise because a peer died. On another host that death is known only this late.
CHECK_ALIVE_S = 30.0
STOPPED = "stop"  # call of the failure of a group that was stopped
STOP_S = 5.0  # for Monarch and the kernel to see that killed processes have ended
LONGEST_LINE = 500  # characters of a line of a log, which a message repeats
TAIL_BYTES = 2**16  # end of a log that a message repeats lines of
LONGEST_PULSE_S = 20.0  # between two heartbeats, which bound the logs too
MOST_LOG_BYTES = 2**28
KEPT_LOG_BYTES = 2**24
REMOTE_STOP_S = 30.0  # Monarch ends processes of other hosts; it waits 20 s for a hanging one


_incarnations = itertools.count()


class Heartbeat(Actor):
    """Runs beside each rank's actor and answers also while that actor is being built or is busy."""

    @endpoint
    async def heartbeat(self) -> tuple[str, int, int]:
        """Return the memory domain, the process id and the resident memory in bytes. A log of more
        than MOST_LOG_BYTES loses all except for its last KEPT_LOG_BYTES.
        """
        shorten(Path(os.environ[LOG]), MOST_LOG_BYTES, KEPT_LOG_BYTES)
        return memory_domain(), os.getpid(), resident_memory()

    @endpoint
    async def leave(self) -> None:
        os._exit(0)

    @endpoint
    async def open_store(self) -> int:
        """Open the store of torch.distributed in this process; return its port.

        The process holds the port until it ends.
        """
        host = os.environ["MASTER_ADDR"]
        options: dict[str, Any] = {"is_master": True, "wait_for_workers": False}
        if is_loopback(host):  # torch would listen on all interfaces
            options["master_listen_fd"] = listen(host, 0).detach()
        self._store = TCPStore(host, 0, **options)
        return self._store.port

    @endpoint
    async def meet_at(self, port: int) -> None:
        """Have torch.distributed connect to that store.

        By default it opens a store itself, at a port that may be taken.
        """
        os.environ |= {"MASTER_PORT": str(port), **EXISTING_STORE}


@dataclass(frozen=True, eq=False)
class Ranks:
    """Ranks of a group, and the time in which each answers a call.

    The first rank to fail ends a call. ``idle`` is an endpoint that returns the seconds since a
    rank made progress; a call goes on while that is below ``timeout_s``.
    """

    group: "ActorGroup"
    actor: Any
    ranks: Sequence[int]
    timeout_s: float
    idle: Endpoint[[], float] | None = None

    async def call(self, endpoint: Endpoint[P, R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Call an endpoint of every rank; return results in rank order."""
        rows = dict.fromkeys(self.ranks, args)
        return await self.group._answers(self, endpoint.name, rows, kwargs)

    async def split(
        self,
        endpoint: Endpoint[Concatenate[A, P], R],
        first: Sequence[A],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R]:
        """Like ``call``, with a first argument for each rank."""
        rows = {rank: (part, *args) for rank, part in zip(self.ranks, first, strict=True)}
        return await self.group._answers(self, endpoint.name, rows, kwargs)


@dataclass(eq=False)
class ActorGroup:
    """Ranks of one role, from ``spawn`` to ``stop``. Every call ends, with results or an
    ActorFailure.

    - An exception of an endpoint fails that call alone.
    - A rank that died, or did not answer in time, fails the group: all pending and later calls
      raise that first failure. ::

        group = ActorGroup("trainer", Place(ranks=2), hosts, heartbeat=60.0)
        await group.spawn(PolicyTrainer, config, deadline=600.0)
        answers = await group.on(timeout_s=600.0).call(PolicyTrainer.push_weights, 3)
        await group.stop()      # a group of the same name can be spawned after it
    """

    name: str
    place: Place
    hosts: Hosts
    heartbeat: float = 0.0
    worked: Callable[[int, Span], None] = lambda rank, work: None
    """Function that is called with a rank and work of its own, when an answer reports it."""

    def __post_init__(self) -> None:
        self.port = 0
        # Unique, since Monarch may report a death after the next group of this name has started.
        self._mesh = f"{self.name}-{next(_incarnations)}"
        self._memory = [0] * self.place.ranks  # resident bytes
        self._oom_kills = oom_kills()
        self._procs: ProcMesh | None = None
        self._actor: Any = None
        self._processes: list[Process] = []
        self._elsewhere: list[int] = []
        self._background: list[asyncio.Task[None]] = []
        self._ones = dict[tuple[bool, int], Any]()
        self._doing: dict[int, list[str]] = {rank: [] for rank in range(self.place.ranks)}

    @cached_property
    def _over(self) -> asyncio.Future[ActorFailure]:
        """Done if the group failed or was stopped. Made on first use, since a group may be
        constructed on another event loop.
        """
        return asyncio.get_running_loop().create_future()

    async def spawn(
        self,
        actor: type[Actor],
        *args: Any,
        deadline: float,
        env: dict[str, str] | None = None,
        meet: bool = True,
    ) -> None:
        """Start processes, with ``env`` on top of their hosts', and ``actor(*args)`` in each.

        ``meet``: whether the processes can open process groups of torch.distributed.
        """
        self.hosts.report_deaths(self._mesh, self._died)
        self._procs = self.hosts.spawn(self.name, self.place, env=env or {})
        self._pulse = self._procs.spawn(self._mesh, Heartbeat)
        answers = await self._beside(deadline).call(Heartbeat.heartbeat)
        for rank, (domain, pid, _) in enumerate(answers):
            if domain != memory_domain():
                self._elsewhere.append(rank)
            else:
                with contextlib.suppress(ProcessLookupError):  # it has died: Monarch reports that
                    self._processes.append(Process(pid, partial(self._died, rank)))
        if meet:
            (self.port,) = await self._beside(deadline, [0]).call(Heartbeat.open_store)
            await self._beside(deadline).call(Heartbeat.meet_at, self.port)
        self._actor = self._procs.spawn(self._mesh, actor, *args)
        self._background.append(asyncio.create_task(self._beat()))

    def on(self, rank: int | None = None, *, timeout_s: float) -> Ranks:
        """Return every rank, or one, to be called."""
        ranks = range(self.place.ranks) if rank is None else [rank]
        return Ranks(self, self._actor, ranks, timeout_s)

    def _beside(self, timeout_s: float, ranks: Sequence[int] = ()) -> Ranks:
        """Return the actors beside every rank, or some, to be called."""
        return Ranks(self, self._pulse, ranks or range(self.place.ranks), timeout_s)

    def watch(self, endpoint: Endpoint[[], None]) -> None:
        """Call ``endpoint``, which returns when the rank closes. An exception fails the group."""

        async def watched() -> None:
            try:
                await self.on(timeout_s=math.inf).call(endpoint)
            except ActorFailure as failure:
                self._fail(failure)

        self._background.append(asyncio.create_task(watched()))

    async def check_alive(self, within_s: float | None = None) -> None:
        """Return when every rank has answered a heartbeat.

        Raises the group's failure. A rank that does not answer within ``within_s`` fails the group.
        """
        deadline = within_s or max(CHECK_ALIVE_S, self.heartbeat)
        answers = await self._beside(deadline).call(Heartbeat.heartbeat)
        self._memory = [resident for *_, resident in answers]

    async def failed(self) -> ActorFailure:
        """Wait for the group's failure and return it. Being stopped is not a failure."""
        failure = await asyncio.shield(self._over)
        return failure if failure.call != STOPPED else await asyncio.Future()

    @property
    def is_over(self) -> bool:
        """Whether the group failed or was stopped."""
        return self._over.done()

    async def stop(self) -> None:
        """End the processes, whatever they are doing, and fail pending calls. Raises nothing."""
        self.hosts.ignore_deaths(self._mesh)
        if not self._over.done():
            self._over.set_result(self._failure([0], STOPPED, "died", "it was stopped"))
        for task in self._background:
            task.cancel()
        for process in self._processes:  # Monarch would wait for their interpreters to end
            process.kill()
        for rank in self._elsewhere:
            with contextlib.suppress(Exception):  # the rank has ended
                self._one(self._pulse, rank).leave.broadcast()
        procs = self._procs
        self._procs = None
        await stop_procs(procs, deadline=REMOTE_STOP_S if self._elsewhere else STOP_S)
        if ends := [process.ended for process in self._processes]:
            await asyncio.wait(ends, timeout=STOP_S)

    def _died(self, rank: int, reason: str = "") -> None:
        """Fail the group because a rank's process died; the message has the end of its log."""
        during = self._doing[rank][-1] if self._doing[rank] else "between calls"
        # Monarch's first line names its own meshes.
        reason = reason.partition("\n")[2].strip() or reason
        what = f"the process died: {reason}" if reason else "the process died"
        if oom_kills() > self._oom_kills:
            what += (
                f"; the kernel of this host has ended a process for lack of memory, and this one "
                f"had {self._memory[rank] / 2**30:.1f} GiB at its last sign of life"
            )
        log = _tail(self.hosts.logs / f"{self.name}-{rank}.log")
        self._fail(self._failure([rank], during, "died", f"{what}\n{log}"))

    def _fail(self, failure: ActorFailure) -> None:
        if not self._over.done():
            self._over.set_result(failure)

    def _failure(
        self, ranks: Iterable[int], call: str, kind: Literal["died", "silent", "raised"], what: str
    ) -> ActorFailure:
        first, *others = sorted(ranks)
        named = f"ranks {', '.join(map(str, [first, *others]))}" if others else f"rank {first}"
        node = self.hosts.name_of(self.place, first)
        where = f" on {node}" if node else ""
        failure = ActorFailure if kind == "raised" else RankLost
        message = f"{self.name} {named}{where}, {call}: {what}"
        return failure(message, actor=self.name, rank=first, call=call, kind=kind)

    def raised(self, rank: int, call: str, cause: Exception, more: str = "") -> ActorFailure:
        """Return the failure of a call that raised ``cause`` on a rank."""
        what = str(cause) if isinstance(cause, RunError) else error_text(cause)
        failure = self._failure([rank], call, "raised", f"{what}{more}")
        failure.__cause__ = cause
        return failure

    async def _beat(self) -> None:
        with contextlib.suppress(ActorFailure):  # ``failed`` and every call report it
            while True:
                await asyncio.sleep(min(self.heartbeat / 3 or math.inf, LONGEST_PULSE_S))
                await self.check_alive(self.heartbeat or math.inf)

    async def _answers(
        self, to: Ranks, endpoint: str, rows: Mapping[int, Sequence[Any]], kwargs: Mapping[str, Any]
    ) -> list[Any]:
        """Call ``endpoint`` of each rank with its row of arguments; return the answers.

        Raises the first failure of the group, or of one of these ranks.
        """
        if self._over.done():
            raise self._over.result().with_traceback(None)
        loop = asyncio.get_running_loop()
        tasks = {
            rank: loop.create_task(self._ask(to, endpoint, rank, *args, **kwargs))
            for rank, args in rows.items()
        }
        ends = loop.time() + to.timeout_s
        pending = {*tasks.values()}
        doing = [] if to.actor is self._pulse else [self._doing[rank] for rank in tasks]
        for calls in doing:
            calls.append(endpoint)
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
                    if to.idle and (left := to.timeout_s - await self._idle_s(to, silent[0])) > 0:
                        ends = loop.time() + left
                        continue
                    what = f"no answer within {to.timeout_s:.0f} s"
                    self._fail(self._failure(silent, endpoint, "silent", what))
                answers = [task.result() for task in tasks.values() if task in done]
                raised = [answer for answer in answers if isinstance(answer, ActorFailure)]
                if raised and self.place.ranks > 1 and to.actor is not self._pulse:
                    with contextlib.suppress(ActorFailure):  # it is the group's failure
                        await self.check_alive()
                if self._over.done():
                    raise self._over.result().with_traceback(None)
                if raised:
                    raise raised[0]
        finally:
            for task in pending:
                task.cancel()
            for calls in doing:
                calls.remove(endpoint)
        return [task.result() for task in tasks.values()]

    async def _idle_s(self, to: Ranks, rank: int) -> float:
        """Return the idle seconds of a rank; infinity if it does not return them soon."""
        assert to.idle is not None, "the caller checks this"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CHECK_ALIVE_S):
                answer = await self._ask(to, to.idle.name, rank)
                return answer if isinstance(answer, float) else math.inf
        return math.inf

    def _one(self, actor: Any, rank: int) -> Any:
        """Return the mesh of one rank of ``actor``, which is expensive to make."""
        key = (actor is self._pulse, rank)
        if key not in self._ones:
            self._ones[key] = actor.slice(**self.hosts.coordinates(self.place, rank))
        return self._ones[key]

    async def _ask(self, to: Ranks, endpoint: str, rank: int, *args: Any, **kwargs: Any) -> Any:
        """Return the rank's answer, or its failure."""
        try:
            answer = await getattr(self._one(to.actor, rank), endpoint).call_one(*args, **kwargs)
        except ActorError as error:
            return self.raised(rank, endpoint, error.exception, f"\n{error}")
        except (RuntimeError, ValueError) as error:  # Monarch's own: the actor is gone
            self._died(rank, str(error))
            return self._over.result()
        if not isinstance(answer, Timed):
            return answer
        for work in answer.work:
            self.worked(rank, work)
        return answer.answer


def _tail(log: Path, lines: int = 20) -> str:
    if not log.is_file():
        return f"{log} was never written"
    text = end_of(log, TAIL_BYTES).decode(errors="replace")
    ends = [line[:LONGEST_LINE] for line in text.splitlines()[-lines:]]
    return "\n".join([f"end of {log}:", *ends])
