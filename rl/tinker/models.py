"""Models of clients: the order of their requests, and their turns on the trainer."""

import asyncio
import json
import math
import re
import time
from contextlib import suppress
from typing import Any

from rl.errors import ConfigError, RankLost, RunError, error_text
from rl.session.concurrency import Signal
from rl.tinker.errors import BadRequest, UserError
from rl.tinker.futures import Future
from rl.tinker.parts import Parts
from rl.tinker.protocol import read
from rl.tinker.store import Accepted, Answer
from rl.tinker.verbs import Model, Verbs, adapter_of

GAP_S = 330.0
"""Time that a request waits for those before it: longer than the SDK tries to send one."""
ALIVE_GAP_S = 90.0
"""Time that a request waits for those before it while other requests of its session come."""
HEARD_S = 20.0
"""Time since the latest request of a session whose client is there."""
WINDOW = 4096
"""Number of requests of a model that may wait."""
WAITING_BYTES = 2**30
"""Size of the bodies of all requests that may wait."""
TURN = 16
"""Number of requests of a model before another model has its turn."""
MAX_ADAPTERS = 16
"""Number of adapters that the trainer holds; that of the model used least recently makes room."""
LIVES = 3
"""Number of losses of the trainer during a request after which the request is given up."""
REPLAYED = ("create_model", "load_weights", "forward_backward", "optim_step")
"""Requests that change a model."""
UNRESTORED = "the model could not be restored"


class Models:
    """Models of all clients on one trainer. ::

        models = Models(parts)
        await models.load()
        promise = models.accept("sess-1:train:0", 1, "optim_step", body)
        await models.run()      # while the session runs

    - Requests of a model run by their numbers, whatever the order in which they come. One that has
      come before gets the same future, and runs once.
    - A request that does not come within GAP_S seconds after a later one is given up, or within
      ALIVE_GAP_S seconds if other requests of its session come.
    - Models take turns on the trainer. A turn ends with an optimizer step.
    - The store has the newest state of a model, and the requests that changed it since. If the
      server or the trainer is lost, these run again on that state; their answers stay. A request
      that failed has changed nothing, and does not run again.
    - A request during which the trainer is lost LIVES times fails, so that other models go on.
    """

    def __init__(self, parts: Parts):
        self._parts = parts
        self._session = parts.session
        self._store = parts.store
        self._checkpoints = parts.checkpoints
        self._models: dict[str, Model] = {}
        self._here: dict[str, Model] = {}  # whose adapters the trainer holds, the last used last
        self._bytes = 0
        self._verbs = Verbs(parts)
        self._changed = Signal()
        self._current: Model | None = None  # whose request runs

    async def load(self) -> None:
        """Read the models, and the requests that wait, from the store."""
        self._parts.futures.digests |= await self._store.digests()
        for id in self._store.facts["model"]:
            model = self._models[id] = Model(id, await self._store.progress(id))
            if self._verbs.fact(model)["failed"].startswith(UNRESTORED):  # of an older server
                self._verbs.set(model, failed="")
            for request in await self._store.journal(id, model.next_seq):
                self._enqueue(model, request)

    # Requests.

    def used(self, id: str) -> float:
        """Return the time of the latest request of a model, in Unix seconds."""
        return self._models[id].used

    def create(self, id: str, verb: str, body: bytes, **fact: Any) -> dict[str, Any]:
        """Return the promise of a new model, or that of the request that created it before."""
        if id not in self._models:
            defaults = {"lora": None, "state": "", "state_seq": -1, "live": "", "failed": ""}
            self._store.put("model", id, {**defaults, **fact})
            self._models[id] = Model(id)
        return self.accept(id, 0, verb, body)

    def drop(self, id: str) -> None:
        """Forget a model, unless its adapter is on the trainer or requests wait."""
        if id not in self._here and not self._models[id].waiting:
            del self._models[id]
            fact = self._store.drop("model", id)
            self._store.forget(id)
            for name in ("state", "live"):
                self._checkpoints.release(fact[name])

    def free_finished(self) -> None:
        """Delete the states and unnamed weights of models whose sessions have finished, once no
        request of a model waits. Checkpoints stay.
        """
        for model in self._models.values():
            fact = self._verbs.fact(model)
            if self._has_finished(model) and not model.waiting and (fact["live"] or fact["state"]):
                self._verbs.set(model, live="", state="")
                self._checkpoints.release(fact["live"])
                self._checkpoints.release(fact["state"])
                self._store.cut(model.id, model.next_seq)

    def _has_finished(self, model: Model) -> bool:
        session = self._store.facts["session"].get(self._verbs.fact(model)["session"], {})
        return bool(session.get("finished"))

    def accept(self, id: str, seq: int, verb: str, body: bytes) -> dict[str, Any]:
        """Return the promise of request ``seq`` of a model.

        Raises BadRequest if the model is unknown or its session has finished, or too much waits.
        """
        self._store.get("model", id)
        model = self._models[id]
        model.used = time.time()
        stripped = re.sub(rb'"sampling_session_seq_id": *\d+', b"", body)  # a retry has another one
        digest = self._parts.futures.require_same(f"{id}:{seq}", verb.encode() + stripped)
        if seq < model.next_seq:
            return {"request_id": f"{id}:{seq}", "model_id": id}
        if seq in model.waiting:
            return model.waiting[seq][1].promise
        if self._has_finished(model):
            raise BadRequest(410, f"the session of {id} has finished")
        if seq >= model.next_seq + WINDOW:
            raise BadRequest(400, f"seq_id is {seq}, and {model.next_seq} has not come yet")
        if self._bytes + len(body) > WAITING_BYTES:
            raise BadRequest(429, "too many requests wait; try again later")
        request = Accepted(seq, verb, body)
        self._store.accept(id, request, digest)
        return self._enqueue(model, request).promise

    def _enqueue(self, model: Model, request: Accepted) -> Future:
        future = self._parts.futures.open(f"{model.id}:{request.seq}", model_id=model.id)
        model.waiting[request.seq] = request, future
        self._bytes += len(request.body)
        if not model.is_ready:
            later = asyncio.get_running_loop().call_later
            for seconds in (ALIVE_GAP_S, GAP_S):
                later(seconds, self._give_up, model, request.seq, seconds)
        self._changed.notify()
        return future

    def _give_up(self, model: Model, seq: int, seconds: float) -> None:
        """Give up the requests before ``seq`` if the next one has not come within ``seconds``."""
        heard = self._parts.heard.get(model.id.partition(":")[0], -math.inf)
        if seconds < GAP_S and heard + HEARD_S < time.monotonic():  # the client may come back
            return
        while seq in model.waiting and not model.is_ready:
            text = f"request {model.next_seq} did not come within {seconds:g} s after a later one"
            self._store.accept(model.id, Accepted(model.next_seq, "gap"))
            self._store.answer(model.id, model.next_seq, Answer.failure(text, "user"))
            model.next_seq += 1
        self._changed.notify()

    # Turns.

    async def run(self) -> None:
        """Run the requests of all models. Raises RankLost; call it again once the trainer runs."""
        self._here.clear()
        for name in [*self._session.adapters]:
            await self._session.drop_adapter(name)
        while True:
            await self._changed.until(
                lambda: any(candidate.is_ready for candidate in self._models.values())
            )
            for model in [candidate for candidate in self._models.values() if candidate.is_ready]:
                await self._take_turn(model)

    async def note_loss(self) -> None:
        """Count the loss of the trainer against the request that was running."""
        if (model := self._current) is not None:
            self._verbs.set(model, lost=[model.next_seq, self._losses(model) + 1])
            with suppress(RunError):
                await self._store.flush()

    def _losses(self, model: Model) -> int:
        """Return how often the trainer was lost during the next request of a model."""
        seq, count = self._verbs.fact(model).get("lost", (-1, 0))
        return count if seq == model.next_seq else 0

    async def _attempt(self, model: Model, request: Accepted) -> Answer:
        """Run a request on the adapter of its model; return its answer."""
        if self._losses(model) >= LIVES:
            text = f"the trainer was lost {LIVES} times during this request; it is given up"
            if model.is_restoring:
                model.failed = f"{UNRESTORED}: the trainer was lost {LIVES} times"
            return Answer.failure(text, "server")
        self._current = model
        await self._bring(model)
        answer = await self._result(model, request)
        self._current = None
        return answer

    async def _take_turn(self, model: Model) -> None:
        for _ in range(TURN):
            if not model.is_ready:
                break
            request, future = model.waiting[model.next_seq]
            answer = await self._attempt(model, request)
            del model.waiting[request.seq]
            self._bytes -= len(request.body)
            model.next_seq += 1
            keep = request.verb in REPLAYED and request.seq > self._verbs.fact(model)["state_seq"]
            self._store.answer(model.id, request.seq, answer, keep=keep and not answer.is_failure)
            self._parts.futures.resolve(future, answer)
            if request.verb == "optim_step":
                try:
                    await asyncio.to_thread(self._record, model, request.seq, answer)
                except Exception as error:  # training goes on
                    self._warn(model, f"its metrics cannot be written: {error_text(error)}")
                break
        if model.steps >= self._parts.state_every:
            await self._try_write_state(model)

    async def _result(self, model: Model, request: Accepted) -> Answer:
        """Run a request; return its answer."""
        try:
            if reason := self._verbs.fact(model)["failed"] or model.failed:
                raise UserError(reason)
            run = getattr(self._verbs, request.verb)
            arguments = {}
            if not request.verb.startswith("forward"):
                arguments = read(run, request.body, whole=request.verb not in REPLAYED[:2])
            answer: Answer = await run(model, request, **arguments)
            return answer
        except RankLost:
            raise
        except Exception as error:  # the server goes on
            is_users = isinstance(error, UserError | ConfigError)
            text = str(error) if is_users else error_text(error)
            has_part = request.verb in REPLAYED and not isinstance(error, UserError)
        if not is_users:
            self._parts.events.warn(f"{model.id}: {request.verb} {request.seq} failed: {text}")
        if has_part:  # the adapter may have a part of the request
            await self._forget(model)
        if request.seq == 0:
            self._verbs.set(model, failed=f"the model was not created: {text}")
        return Answer.failure(text, "user" if is_users else "server")

    async def _bring(self, model: Model) -> None:
        """Have the trainer hold the adapter of a model as its requests so far have left it."""
        is_here = self._here.pop(model.id, None) is not None
        while len(self._here) >= MAX_ADAPTERS:
            await self._send_away(next(iter(self._here.values())))
        self._here[model.id] = model
        if is_here or model.failed:
            return
        model.is_restoring = True
        fact = self._verbs.fact(model)
        model.changed = fact["state_seq"]
        model.steps = 0
        model.skipped = 0
        try:
            if fact["state"]:
                await self._session.create_adapter(model.id, adapter_of(fact["lora"]))
                await self._session.load_state(
                    self._checkpoints.at(fact["state"]), adapter=model.id
                )
            for request in await self._store.journal(model.id, model.changed + 1, model.next_seq):
                answer = await self._result(model, request)
                if answer.is_failure:
                    raise RunError(f"request {request.seq} failed, {answer.content!r}")
        except RankLost:
            raise
        except Exception as error:  # the other models go on
            model.failed = f"{UNRESTORED}: {error_text(error)}; a restart of the server tries again"
            self._warn(model, model.failed)
        model.is_restoring = False

    async def _send_away(self, model: Model) -> None:
        """Have the trainer forget the adapter of a model, whose state is on disk then."""
        changed = model.changed > self._verbs.fact(model)["state_seq"]
        if changed and not self._has_finished(model):
            await self._try_write_state(model)
        await self._forget(model)

    async def _forget(self, model: Model) -> None:
        """Have the trainer forget the adapter of a model. The next use brings it again."""
        self._here.pop(model.id, None)
        if model.id in self._session.adapters:
            await self._session.drop_adapter(model.id)

    async def _try_write_state(self, model: Model) -> None:
        """Write the state of a model if possible; the journal has all that is not in it."""
        try:
            await self._verbs.write_state(model)
        except RankLost:
            raise
        except Exception as error:  # training goes on
            model.steps = 0  # tried again later
            self._warn(model, f"its state cannot be written: {error_text(error)}")

    def _warn(self, model: Model, text: str) -> None:
        if text != model.said:
            model.said = text
            self._parts.events.warn(f"{model.id}: {text}")

    def _record(self, model: Model, seq: int, answer: Answer) -> None:
        """Write the metrics and samples of a step, which ``rl.view`` shows."""
        folder = self._parts.folder / model.id
        folder.mkdir(parents=True, exist_ok=True)
        row = {"step": seq, **json.loads(answer.content).get("metrics", {})}
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
        self._parts.samples.write(model.id, seq)
