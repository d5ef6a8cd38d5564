"""Actors of one role, called rank by rank; every call has a deadline and fails by name."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import monarch.actor
from monarch.actor import Actor, ActorError, MeshFailure, ProcMesh

from rl.errors import RunError
from rl.launch.local import spawn_procs, stop_procs

GRACE_S = 2.0  # a call to the dead rank fails at about the same time, and knows better what it was doing


class Supervisor:
    """Knows the first failure of a run; whoever waits for anything is told of it at once."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._failure: asyncio.Future[None] = self._loop.create_future()
        self._stopping = False
        self._groups: dict[str, ActorGroup] = {}
        monarch.actor.unhandled_fault_hook = self._on_fault

    def register(self, group: "ActorGroup") -> None:
        """Have the death of the group's processes reported in its name."""
        self._groups[group.name] = group

    def fail(self, error: BaseException) -> None:
        """Record ``error`` unless something failed before it, or the run is being taken down."""
        if not self._failure.done() and not self._stopping:
            self._failure.set_exception(error)

    def stop(self) -> None:
        """From now on the end of an actor is no failure."""
        self._stopping = True
        if self._failure.done():
            self._failure.exception()  # seen: no warning about it at exit
        self._failure = self._loop.create_future()

    async def wait(self, tasks: Sequence["asyncio.Task[Any]"], *, deadline: float, what: str) -> list[Any]:
        """Results of ``tasks`` in order; raises the first exception, or RunError after ``deadline`` seconds."""
        pending: set[asyncio.Future[Any]] = {*tasks}
        ends = self._loop.time() + deadline
        try:
            while pending:
                done, pending = await asyncio.wait(
                    {*pending, self._failure}, timeout=ends - self._loop.time(), return_when=asyncio.FIRST_COMPLETED
                )
                pending.discard(self._failure)
                if not done:
                    raise RunError(
                        f"{what}: no answer within {deadline:.0f} s; {len(pending)} of {len(tasks)} ranks are silent"
                    )
                for task in [t for t in done if t is not self._failure] + [t for t in done if t is self._failure]:
                    task.result()
        finally:
            for task in pending:
                task.cancel()
        return [task.result() for task in tasks]

    def _on_fault(self, failure: MeshFailure) -> None:
        # Called once for the actors of a role and once for each helper that Monarch runs beside them.
        group = self._groups.get(failure.mesh_name.rpartition("-")[0])
        if group is not None:
            parts = re.fullmatch(r"MeshFailure\(.*crashed_ranks=\[(\d+).*?event=(.*)\)", str(failure), re.DOTALL)
            rank, event = (int(parts[1]), parts[2]) if parts else (0, str(failure))
            error = group.died(rank, "between calls", event)
            self._loop.call_soon_threadsafe(self._loop.call_later, GRACE_S, self.fail, error)


class ActorGroup:
    """The ranks of one role: their processes, their actor, and calls to them."""

    def __init__(self, name: str, supervisor: Supervisor, *, logs: Path):
        self.name, self.ranks = name, 0
        self._supervisor, self._logs = supervisor, logs
        self._procs: ProcMesh | None = None
        self._watching: list[asyncio.Task[None]] = []
        supervisor.register(self)

    def spawn(
        self, actor: type[Actor], ranks: int, *args: Any, env: dict[str, str] | None = None, first_device: int = 0
    ) -> None:
        """Start ``ranks`` processes, with ``env`` on top of this process's, and ``actor(*args)`` in each."""
        self.ranks = ranks
        self._procs = spawn_procs(self.name, ranks, env=env or {}, logs=self._logs, first_device=first_device)
        self._actor = self._procs.spawn(self.name, actor, *args)

    async def call(self, endpoint: str, *args: Any, deadline: float, rank: int | None = None) -> list[Any]:
        """``endpoint`` of every rank, or of one; results in rank order. The first rank to fail ends the call."""
        ranks = range(self.ranks) if rank is None else [rank]
        return await self.call_each(endpoint, dict.fromkeys(ranks, args), deadline=deadline)

    async def call_each(self, endpoint: str, args: Mapping[int, Sequence[Any]], *, deadline: float) -> list[Any]:
        """``endpoint`` of the given ranks, each with arguments of its own."""
        tasks = [asyncio.ensure_future(self._call_rank(rank, endpoint, own)) for rank, own in args.items()]
        return await self._supervisor.wait(tasks, deadline=deadline, what=f"{self.name}.{endpoint}")

    def watch(self, endpoint: str) -> None:
        """Call ``endpoint``, which returns when the rank is closed; if it raises, the run has failed."""

        async def watch_rank(rank: int) -> None:
            try:
                await self._call_rank(rank, endpoint, ())
            except RunError as error:
                self._supervisor.fail(error)

        self._watching = [asyncio.ensure_future(watch_rank(rank)) for rank in range(self.ranks)]

    async def stop(self) -> None:
        """End the processes, if there are any left."""
        procs, self._procs = self._procs, None
        await stop_procs(procs)

    async def _call_rank(self, rank: int, endpoint: str, args: Sequence[Any]) -> Any:
        try:
            return await _resolve(getattr(self._actor.slice(ranks=rank), endpoint).call_one(*args))
        except ActorError as error:
            cause = error.exception
            named = str(cause) if isinstance(cause, RunError) else f"{type(cause).__name__}: {cause}"
            raise RunError(f"{self.name} rank {rank}, {endpoint}: {named}\n{error}") from None
        except Exception as error:
            raise self.died(rank, endpoint, error) from None

    def died(self, rank: int, during: str, cause: object) -> RunError:
        """The error that says so, with what the rank's log ended on."""
        first, *rest = str(cause).strip().splitlines() or [type(cause).__name__]
        reason = "\n".join(rest).strip() or first  # Monarch's first line names its own meshes
        log = self._logs / f"{self.name}-{rank}.log"
        return RunError(f"{self.name} rank {rank}, {during}: the process died: {reason}\n{_tail(log)}")


async def _resolve(future: Any) -> Any:
    return await future


def _tail(log: Path, lines: int = 20) -> str:
    if not log.is_file():
        return f"{log} was never written"
    return "\n".join([f"end of {log}:", *log.read_text(errors="replace").splitlines()[-lines:]])
