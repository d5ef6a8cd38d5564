"""The thread that owns a rank's engine, and the coroutines through which an actor talks to it."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from rl.errors import RunError
from rl.generation.engine import GenerationEngine
from rl.types import Completion, GenerationRequest

# how long a rank without work sleeps; far below the timeout of the collectives its peers wait in
HEARTBEAT_S = 1.0


@dataclass(frozen=True, slots=True)
class Add:
    requests: list[GenerationRequest]


@dataclass(frozen=True, slots=True)
class Abort:
    request_ids: list[str]


@dataclass(frozen=True, slots=True)
class Pull:
    version: int


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    pass


@dataclass(frozen=True, slots=True)
class Close:
    pass


Command = Add | Abort | Pull | ResetPrefixCache | Close

NOTHING = -1  # the version of a rank whose pull failed


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a pull brought: the version that the generator holds now, and how long no step could
    run, in seconds.
    """

    version: int
    pause_s: float


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """One ``generate`` in flight: what it asked for, and what has come back so far."""

    add: Add
    completions: dict[str, Completion]
    done: Future

    @property
    def ids(self) -> list[str]:
        return [request.request_id for request in self.add.requests]


class EngineLoop:
    """Generates continuously in a thread of its own.

    ``make_engine`` builds the engine in that thread. ``pull(engine, version)`` copies the weights
    of a policy version into ``engine.parameters()``; where it brings a newer one it returns which.
    With tensor parallelism every rank runs a loop, rank 0 leads: what it is asked for reaches all
    ranks before the same step. ``generate``, ``abort``, ``pull`` and ``reset_prefix_cache`` are for
    rank 0, the rest for every rank::

        loop = EngineLoop(make_engine, pull)
        await loop.start()
        serving = asyncio.create_task(loop.serve())     # raises what ends the loop
        await loop.pull(version=0)
        completions = await loop.generate(requests)
        await loop.close()

    The first exception in the thread ends the loop, fails all that is pending, and is raised by
    ``serve``. A rank that fails to pull ends its peers too. One that fails within a step may leave
    them inside that step's collectives: the owner of the group must end their processes.
    """

    def __init__(
        self,
        make_engine: Callable[[], GenerationEngine],
        pull: Callable[[GenerationEngine, int], int | None],
    ):
        self._make_engine = make_engine
        self._pull = pull
        self._thread = threading.Thread(target=self._run, name="generation-engine", daemon=True)
        self._changed = threading.Condition()  # guards all below
        self._engine: GenerationEngine | None = None
        self._commands: list[Command] = []
        self._pulls: list[tuple[int, Future]] = []
        self._visits: list[tuple[Callable[[GenerationEngine], Any], Future]] = []
        self._calls: dict[str, _Call] = {}
        self._pending: set[Future] = set()
        self._ended: Future = Future()

    async def start(self) -> None:
        """Start the thread and wait until its engine stands.

        Raises what its construction raises.
        """
        self._thread.start()
        await self.run_between_steps(lambda engine: None)

    async def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        """Completions of ``requests``, in their order; all are admitted before the same step.

        Raises ValueError for a request that cannot be served or whose id is in flight, RunError
        before the first ``pull``. If the caller is cancelled, the requests are aborted.
        """
        if not requests:
            return []
        ids = [request.request_id for request in requests]
        with self._changed:
            engine = self._leader()
            if len(set(ids)) < len(ids) or not self._calls.keys().isdisjoint(ids):
                raise ValueError(f"request ids must be unique among those in flight, got {ids}")
            for request in requests:
                engine.check(request)
            call = _Call(Add(requests), {}, self._promise())
            self._calls.update(dict.fromkeys(ids, call))
            self._tell(call.add)
        call.done.add_done_callback(lambda done: self._forget(call) if done.cancelled() else None)
        return await asyncio.wrap_future(call.done)

    async def abort(self) -> None:
        """Abort every request in flight; whoever waits for one gets a RunError."""
        for call in {*self._calls.values()}:
            self._forget(call)
            if call.done.set_running_or_notify_cancel():
                call.done.set_exception(
                    RunError("the request was aborted: the trainer was started again")
                )

    async def pull(self, version: int) -> Pulled:
        """Have every rank pull policy ``version`` before the same step; what is in flight follows
        ``engine.inflight_policy``.

        One that has not begun is dropped for a newer one: both return when the newer is in. Returns
        at once where the generator holds ``version`` or a newer one.
        """
        with self._changed:
            engine = self._leader()
            if engine.version is not None and engine.version >= version:
                return Pulled(engine.version, 0.0)
            done = self._promise()
            self._pulls.append((version, done))
            self._changed.notify()
        return await asyncio.wrap_future(done)

    async def reset_prefix_cache(self) -> None:
        """Have every rank forget all prefixes before what is asked for next.

        Ends the loop if anything is in flight.
        """
        with self._changed:
            self._leader()
            self._tell(ResetPrefixCache())

    async def run_between_steps(self, fn: Callable[[GenerationEngine], Any]) -> Any:
        """``fn(engine)``, run by this rank's thread between two steps. No collectives: peers do not
        take part.

        An exception in ``fn`` ends the loop like any other.
        """
        with self._changed:
            done = self._promise()
            self._visits.append((fn, done))
            self._changed.notify()
        return await asyncio.wrap_future(done)

    async def serve(self) -> None:
        """Return when the loop is closed; raise the exception that ended it otherwise."""
        await asyncio.shield(asyncio.wrap_future(self._ended))

    async def close(self) -> None:
        """End the loop; what is pending fails with RunError. On rank 0 this ends every rank, the
        others wait for it.

        Returns when the thread has ended, which may be in a step, a pull or a collective: its
        caller has a deadline.
        """
        with self._changed:
            self._tell(Close())
        while self._thread.is_alive():
            await asyncio.sleep(0.01)

    def _leader(self) -> GenerationEngine:
        """The engine, where it may be given commands.

        Raises RunError elsewhere, or how the loop ended.
        """
        self._check_running()
        if self._engine is None or not self._engine.leads:
            raise RunError(
                "only a started loop on rank 0 of its tensor-parallel group can be asked for this"
            )
        return self._engine

    def _promise(self) -> Future:
        """A future that fails when the loop ends."""
        self._check_running()
        done: Future = Future()
        self._pending.add(done)
        done.add_done_callback(self._pending.discard)
        return done

    def _check_running(self) -> None:
        """Raise how the loop ended, if it has."""
        if self._ended.done():
            self._ended.result()
            raise RunError("the generation loop is closed")

    def _tell(self, command: Command) -> None:
        self._commands.append(command)
        self._changed.notify()

    def _forget(self, call: _Call) -> None:
        """Abort the requests of a caller that was cancelled."""
        with self._changed:
            for request_id in call.ids:
                self._calls.pop(request_id, None)
            if call.add in self._commands:
                self._commands.remove(call.add)
            else:
                self._tell(Abort(call.ids))

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            engine = self._make_engine()
            try:
                self._turn(engine)
            finally:
                engine.close()
        except BaseException as raised:
            error = raised
        with self._changed:
            if error is None:
                self._ended.set_result(None)
            else:
                self._ended.set_exception(error)
            pending = list(self._pending)
        for done in pending:
            if done.set_running_or_notify_cancel():
                done.set_exception(error or RunError("the generation loop was closed"))

    def _turn(self, engine: GenerationEngine) -> None:
        """Visits, commands, one step; again and again until told to close."""
        with self._changed:
            self._engine = engine
        while True:
            commands, visits = self._take(engine)
            for fn, done in visits:
                _settle(done, fn(engine))
            for command in engine.share(commands):
                if isinstance(command, Close):
                    return
                self._execute(engine, command)
            if engine.busy:
                for request_id, completion in engine.step():
                    self._deliver(request_id, completion)

    def _take(self, engine: GenerationEngine) -> tuple[list, list]:
        """What was asked since the last step. A leader without work sleeps here, its followers in
        ``share``.

        The newest pull goes first: what has not begun begins with its weights. While it drains, so
        waits what is new.
        """
        with self._changed:
            if engine.leads and not engine.busy:
                self._changed.wait_for(
                    lambda: self._commands or self._pulls or self._visits, timeout=HEARTBEAT_S
                )
            visits = self._visits
            self._visits = []
            commands = self._commands
            self._commands = []
            if self._pulls and engine.inflight_policy == "drain" and engine.busy:
                self._commands = [command for command in commands if isinstance(command, Add)]
                commands = [command for command in commands if not isinstance(command, Add)]
            elif self._pulls:
                commands.insert(0, Pull(max(version for version, _ in self._pulls)))
            return commands, visits

    def _execute(self, engine: GenerationEngine, command: Command) -> None:
        match command:
            case Add(requests):
                for request in requests:
                    engine.add(request)
            case Abort(request_ids):
                engine.abort(request_ids)
            case Pull(version):
                self._swap(engine, version)
            case ResetPrefixCache():
                engine.reset_prefix_cache()

    def _swap(self, engine: GenerationEngine, version: int) -> None:
        """Pull on every rank, and tell all whom the version brought serves."""
        began = time.perf_counter()
        version = self._pull_everywhere(engine, version)
        engine.weights_changed(version)
        pulled = Pulled(version, time.perf_counter() - began)
        with self._changed:
            served = [done for wanted, done in self._pulls if wanted <= version]
            self._pulls = [(wanted, done) for wanted, done in self._pulls if wanted > version]
        for done in served:
            _settle(done, pulled)

    def _pull_everywhere(self, engine: GenerationEngine, version: int) -> int:
        """The version, this or a newer one, that every rank holds now: those behind the newest
        found pull again.

        No rank goes on to the next step, and waits there for ever, unless all have the weights.
        """
        brought = oldest = NOTHING
        while oldest < version:
            wanted = version
            held = brought
            brought = NOTHING
            try:
                brought = held if held == wanted else self._pull(engine, wanted) or wanted
            finally:
                oldest, version = engine.span(brought)
            if oldest == NOTHING:
                raise RunError(
                    f"another rank of this generator could not pull policy version {wanted}"
                )
        return version

    def _deliver(self, request_id: str, completion: Completion) -> None:
        with self._changed:
            call = self._calls.pop(request_id, None)
        if call is None:  # a follower, or the caller was cancelled
            return
        call.completions[request_id] = completion
        if len(call.completions) == len(call.ids):
            _settle(call.done, [call.completions[name] for name in call.ids])


def _settle(done: Future, result: Any) -> None:
    """Set the result, unless whoever waited was cancelled."""
    if done.set_running_or_notify_cancel():
        done.set_result(result)
