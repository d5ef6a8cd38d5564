"""Thread that owns a rank's engine, and the coroutines through which an actor controls it."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from rl.errors import RunError
from rl.generation.engine import GenerationEngine
from rl.generation.requests import Loads
from rl.metrics import Metrics
from rl.model.activations import Activations
from rl.types import Completion, GenerationRequest, GivenSequence, Part

# sleep of a rank without work, far below the timeout of the collectives that its peers wait in
HEARTBEAT_S = 1.0
KEPT_WORK = 1_000  # stretches of work that wait for ``take_work``
NO_VERSION = -1  # version of a rank that could not pull


class Command(NamedTuple):
    """A command that every rank executes before the same step."""

    kind: Literal["add", "abort", "pull", "reset_prefix_cache", "activations", "close"]
    argument: Any = None
    """Requests to add, request ids to abort, the version to pull, or a GivenSequence."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """Result of a pull: the generator's version now, and the time without steps in seconds."""

    version: int
    pause_s: float


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """One ``generate`` in flight: its command, its request ids and its completions so far."""

    add: Command
    ids: list[str]
    completions: dict[str, Completion]
    done: Future
    on_tokens: Callable[[Part], object]


class EngineLoop:
    """Loop that generates continuously in its own thread.

    ``make_engine`` builds the engine in that thread. ``pull(engine, version)`` copies the weights
    of a policy version, or of a newer one, into ``engine.parameters()``, and returns that version.
    With tensor parallelism every rank runs a loop and rank 0 leads: all ranks execute its commands
    before the same step. ``generate``, ``abort``, ``pull`` and ``activations`` are for rank 0, the
    rest for every rank::

        loop = EngineLoop(make_engine, pull)
        await loop.start()
        serving = asyncio.create_task(loop.serve())     # raises what ends the loop
        await loop.pull(version=0)
        completions = await loop.generate(requests)
        await loop.close()

    The first exception in the thread ends the loop, fails all pending calls, and is raised by
    ``serve``. A rank that fails to pull ends its peers too. A rank that fails within a step may
    leave its peers in collectives: the owner of the group must end their processes.
    """

    def __init__(
        self,
        make_engine: Callable[[], GenerationEngine],
        pull: Callable[[GenerationEngine, int], int],
    ):
        self._make_engine = make_engine
        self._pull = pull
        self._thread = threading.Thread(target=self._run, name="generation-engine", daemon=True)
        self._changed = threading.Condition()  # guards all fields below
        self._engine: GenerationEngine | None = None
        self._commands: list[Command] = []
        self._pulls: list[tuple[int, Future]] = []
        self._visits: list[tuple[Callable[[GenerationEngine], Any], Future]] = []
        self._calls: dict[str, _Call] = {}
        self._pending: set[Future] = set()
        self._loads = Loads()
        self._work: deque[tuple[str, float, float]] = deque(maxlen=KEPT_WORK)
        self._busy_since: float | None = None
        self._activations: Activations | None = None
        self._ended: Future = Future()

    async def start(self) -> None:
        """Start the thread and wait until its engine is built; raise the error of that."""
        self._thread.start()
        await self.run_between_steps(lambda engine: None)

    async def generate(
        self, requests: list[GenerationRequest], *, fresh: bool = False
    ) -> list[Completion]:
        """Return the completions of ``requests``, in their order: see ``begin``. If the caller is
        cancelled, the requests are aborted.
        """
        return await asyncio.wrap_future(self.begin(requests, fresh=fresh))

    def begin(
        self,
        requests: list[GenerationRequest],
        *,
        fresh: bool = False,
        on_tokens: Callable[[Part], object] = lambda part: None,
    ) -> Future:
        """Return the future of the completions of ``requests``; all start in the same step.

        ``fresh``: reset the prefix cache of every rank before, which ends the loop if a request is
        in flight. ``on_tokens`` is called in the engine's thread if the requests stream.

        Raises ValueError if a request cannot be served or its id is in flight, RunError before the
        first ``pull``.
        """
        ids = [request.request_id for request in requests]
        with self._changed:
            engine = self._leader()
            if len(set(ids)) < len(ids) or not self._calls.keys().isdisjoint(ids):
                raise ValueError(f"request ids must be unique among those in flight, got {ids}")
            for request in requests:
                engine.check(request)
            call = _Call(Command("add", requests), ids, {}, self._make_future(), on_tokens)
            self._calls.update(dict.fromkeys(ids, call))
            if fresh:
                self._send(Command("reset_prefix_cache"))
            self._send(call.add)
        call.done.add_done_callback(lambda done: self._abort(call) if done.cancelled() else None)
        if not ids:
            call.done.set_result([])
        return call.done

    def take_load(self) -> Metrics:
        """Return the load of this rank, which leads, over the steps since the last call: see
        :meth:`rl.generation.requests.Loads.take`.
        """
        with self._changed:
            return self._loads.take()

    async def figures(self) -> dict[str, float]:
        """Return LOAD after the newest step, 0 without requests, and COUNTS since the start."""
        with self._changed:
            return self._loads.newest(is_busy=self._busy_since is not None)

    def take_work(self) -> list[tuple[str, float, float]]:
        """Return what this rank worked at since the last call: ``generate``, for as long as it had
        requests, and ``pull``, with begin and end in Unix seconds.
        """
        with self._changed:
            work = [*self._work]
            self._work.clear()
            if self._busy_since is not None:
                now = time.time()
                work.append(("generate", self._busy_since, now))
                self._busy_since = now
        return work

    @property
    def idle_s(self) -> float:
        """Seconds since the engine of rank 0 last sampled a token."""
        return time.monotonic() - self._leader().sampled_at

    async def abort(self, *request_ids: str) -> None:
        """Abort the calls with these requests, or without ids all; their ``generate`` raises
        RunError.
        """
        error = RunError("the request was aborted: no caller waits for it")
        with self._changed:
            ids = self._calls.keys() & (request_ids or self._calls)
            for call in {self._calls[name] for name in ids}:
                self._abort(call)
                _set_outcome(call.done, error=error)

    async def pull(self, version: int) -> Pulled:
        """Make every rank pull policy ``version`` before the same step. Requests in flight follow
        ``engine.inflight_policy``.

        A pull that has not begun gives way to a newer one: both return after it. Returns at once if
        the generator holds ``version`` or a newer one.
        """
        with self._changed:
            engine = self._leader()
            if engine.version is not None and engine.version >= version:
                return Pulled(engine.version, 0.0)
            done = self._make_future()
            self._pulls.append((version, done))
            self._changed.notify()
        return await asyncio.wrap_future(done)

    async def activations(self, sequence: GivenSequence) -> None:
        """Make every rank compute its activations along ``sequence``, for ``take_activations``."""
        with self._changed:
            self._leader()
            self._send(Command("activations", sequence))
        for _ in range(2):  # the first visit may come before the command
            await self.run_between_steps(lambda engine: None)

    async def take_activations(self) -> Activations | None:
        """Return this rank's result of the last ``activations``."""
        return await self.run_between_steps(lambda engine: self._activations)

    async def run_between_steps(self, fn: Callable[[GenerationEngine], Any]) -> Any:
        """Run ``fn(engine)`` in this rank's thread between two steps and return its result. ``fn``
        must not use collectives: peers do not take part. An exception in ``fn`` ends the loop.
        """
        with self._changed:
            done = self._make_future()
            self._visits.append((fn, done))
            self._changed.notify()
        return await asyncio.wrap_future(done)

    async def serve(self) -> None:
        """Return when the loop is closed, or raise the exception that ended it."""
        await asyncio.shield(asyncio.wrap_future(self._ended))

    async def close(self) -> None:
        """End the loop; pending calls fail with RunError. On rank 0 this ends every rank; the
        others wait for it. Returns when the thread has ended, which may be in a step, a pull or a
        collective: callers need a deadline.
        """
        with self._changed:
            self._send(Command("close"))
        while self._thread.is_alive():
            await asyncio.sleep(0.01)

    def _leader(self) -> GenerationEngine:
        """Return the engine if it accepts commands.

        Raises RunError if it does not, or the exception that ended the loop.
        """
        self.require_running()
        if self._engine is None or not self._engine.leads:
            raise RunError("only a started loop on rank 0 of its group accepts commands")
        return self._engine

    def _make_future(self) -> Future:
        """Return a future that fails when the loop ends."""
        self.require_running()
        done: Future = Future()
        self._pending.add(done)
        done.add_done_callback(self._pending.discard)
        return done

    def require_running(self) -> None:
        """Raise the exception that ended the loop, or RunError if it is closed."""
        if self._ended.done():
            self._ended.result()
            raise RunError("the generation loop is closed")

    def _send(self, command: Command) -> None:
        self._commands.append(command)
        self._changed.notify()

    def _abort(self, call: _Call) -> None:
        with self._changed:
            for request_id in call.ids:
                self._calls.pop(request_id, None)
            if call.add in self._commands:
                self._commands.remove(call.add)
            else:
                self._send(Command("abort", call.ids))

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
            self._calls.clear()
            for done in list(self._pending):
                _set_outcome(done, error=error or RunError("the generation loop was closed"))

    def _turn(self, engine: GenerationEngine) -> None:
        """Repeat until closed: call the visitors, execute the commands, step once."""
        with self._changed:
            self._engine = engine
        while True:
            commands, visits = self._take(engine)
            for fn, done in visits:
                _set_outcome(done, fn(engine))
            for kind, argument in engine.share(commands):
                if kind == "close":
                    return
                self._execute(engine, kind, argument)
            self._note_work(engine)
            if engine.busy:
                done = engine.step()
                self._note_work(engine)
                with self._changed:
                    if engine.leads:
                        self._loads.note(engine.load)
                    for request_id, output in done:
                        call = self._calls.get(request_id)
                        if call is None:  # this rank is a follower, or the caller was cancelled
                            continue
                        if isinstance(output, Part):
                            call.on_tokens(output)
                            continue
                        del self._calls[request_id]
                        call.completions[request_id] = output
                        if len(call.completions) == len(call.ids):
                            _set_outcome(call.done, [call.completions[name] for name in call.ids])

    def _note_work(self, engine: GenerationEngine) -> None:
        """Note if this rank has just begun or ended to have requests."""
        since = self._busy_since
        if engine.busy == (since is not None):
            return
        with self._changed:
            self._busy_since = time.time() if since is None else None
            if since is not None:
                self._work.append(("generate", since, time.time()))

    def _take(self, engine: GenerationEngine) -> tuple[list, list]:
        """Return the commands and visitors since the last step. A leader without work sleeps here,
        its followers in ``share``. The newest pull goes first: requests that have not begun start
        with its weights. While it drains, new requests wait.
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
                self._commands = [command for command in commands if command.kind == "add"]
                commands = [command for command in commands if command.kind != "add"]
            elif self._pulls:
                commands.insert(0, Command("pull", max(version for version, _ in self._pulls)))
            return commands, visits

    def _execute(self, engine: GenerationEngine, kind: str, argument: Any) -> None:
        match kind:
            case "add":
                for request in argument:
                    engine.add(request)
            case "abort":
                engine.abort(argument)
            case "pull":
                self._swap(engine, argument)
            case "reset_prefix_cache":
                engine.reset_prefix_cache()
            case "activations":
                self._activations = engine.activations(argument)

    def _swap(self, engine: GenerationEngine, version: int) -> None:
        """Pull on every rank until all hold the same version, this or a newer one; complete all
        pulls up to that version. No rank continues to the next step, where it would wait endlessly,
        unless all ranks have the weights.
        """
        began = time.perf_counter()
        engine.finish_steps()
        current = oldest = NO_VERSION
        while oldest < version:
            wanted = version
            loaded = current
            current = NO_VERSION
            try:
                current = loaded if loaded == wanted else self._pull(engine, wanted)
            finally:
                oldest, version = engine.span(current)
            if oldest == NO_VERSION:
                raise RunError(
                    f"another rank of this generator could not pull policy version {wanted}"
                )
        engine.weights_changed(version)
        pulled = Pulled(version, time.perf_counter() - began)
        with self._changed:
            ended = time.time()
            self._work.append(("pull", ended - pulled.pause_s, ended))
            served = [done for wanted, done in self._pulls if wanted <= version]
            self._pulls = [(wanted, done) for wanted, done in self._pulls if wanted > version]
        for done in served:
            _set_outcome(done, pulled)


def _set_outcome(done: Future, result: Any = None, error: BaseException | None = None) -> None:
    """Set the result or the error, unless the waiting caller was cancelled."""
    if done.set_running_or_notify_cancel():
        done.set_result(result) if error is None else done.set_exception(error)
