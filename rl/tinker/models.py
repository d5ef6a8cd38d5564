"""Models of clients: the order of their requests, and their turns on the trainer."""

import asyncio
import hashlib
import json
import math
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rl.errors import ConfigError, RankLost, RunError, said_by
from rl.observe.events import finite
from rl.session.concurrency import Signal
from rl.tinker.checkpoints import until
from rl.tinker.errors import BadRequest, UserError
from rl.tinker.forward_backward import prepare
from rl.tinker.futures import Future
from rl.tinker.graph import Graph
from rl.tinker.parts import Parts
from rl.tinker.protocol import Adam, Lora, Metadata, Number, Optimizer, Seconds, Text, read
from rl.tinker.store import Accepted, Answer, Fact
from rl.tinker.wire import MEDIA_TYPE, parse_forward_backward
from rl.training.trainer_config import TINKER_NAMES, AdapterConfig

GAP_S = 330.0
"""Time that a request waits for those before it: longer than the SDK tries to send one."""
WINDOW = 4096
"""Number of requests of a model that may wait."""
WAITING_BYTES = 2**30
"""Size of the bodies of all requests that may wait."""
TURN = 16
"""Number of requests of a model before another model has its turn."""
MAX_ADAPTERS = 16
"""Number of adapters that the trainer holds; that of the model used least recently makes room."""
REPLAYED = ("create_model", "load_weights", "forward_backward", "optim_step")
"""Requests that change a model."""
PLACES = {
    "save_weights": "weights",
    "save_weights_for_sampler": "sampler_weights",
    "save_weights_external": "external_weights",
}
"""Kind in the paths of the checkpoints that a request makes."""


@dataclass(eq=False)
class Model:
    """Model of a client, of which the trainer may hold the adapter."""

    id: str
    next_seq: int = 0
    """Number of the request to run next. Request 0 creates the model."""
    waiting: dict[int, tuple[Accepted, Future]] = field(default_factory=dict)
    changed: int = -1
    """Number of the last request that changed weights or moments."""
    steps: int = 0
    """Number of optimizer steps since the newest state."""
    used: float = field(default_factory=time.time)

    @property
    def is_ready(self) -> bool:
        """Whether a request can run."""
        return self.next_seq in self.waiting


class Models:
    """Models of all clients on one trainer. ::

        models = Models(parts)
        await models.load()
        promise = models.accept("sess-1:train:0", 1, "optim_step", body)
        await models.run()      # while the session runs

    - Requests of a model run by their numbers, whatever the order in which they come. One that has
      come before gets the same future, and runs once.
    - A request that does not come within GAP_S seconds after a later one is given up.
    - Models take turns on the trainer. A turn ends with an optimizer step.
    - The store has the newest state of a model, and the requests that changed it since. If the
      server or the trainer is lost, these run again on that state; their answers stay.
    """

    def __init__(self, parts: Parts):
        self._parts = parts
        self._session = parts.session
        self._store = parts.store
        self._checkpoints = parts.checkpoints
        self._models: dict[str, Model] = {}
        self._here: dict[str, Model] = {}  # whose adapters the trainer holds, the last used last
        self._bytes = 0
        self._changed = Signal()

    async def load(self) -> None:
        """Read the models, and the requests that wait, from the store."""
        for id in self._store.facts["model"]:
            model = self._models[id] = Model(id, await self._store.progress(id))
            for request in await self._store.journal(id, model.next_seq):
                self._enqueue(model, request)

    # Requests.

    def used(self, id: str) -> float:
        """Return the time of the latest request of a model, in Unix seconds."""
        return self._models[id].used

    def create(self, id: str, verb: str, body: bytes, **fact: Any) -> dict[str, Any]:
        """Return the promise of a new model, or that of the request that created it before."""
        if id not in self._models:
            own = {"lora": None, "state": "", "state_seq": -1, "live": "", "failed": ""}
            self._store.put("model", id, {**own, **fact})
            self._models[id] = Model(id)
        return self.accept(id, 0, verb, body)

    def accept(self, id: str, seq: int, verb: str, body: bytes) -> dict[str, Any]:
        """Return the promise of request ``seq`` of a model.

        Raises BadRequest if the model is unknown, or too much waits.
        """
        self._store.get("model", id)
        model = self._models[id]
        model.used = time.time()
        if seq < model.next_seq:
            return {"request_id": f"{id}:{seq}", "model_id": id}
        if seq in model.waiting:
            return model.waiting[seq][1].promise
        if seq >= model.next_seq + WINDOW:
            raise BadRequest(400, f"seq_id is {seq}, and {model.next_seq} has not come yet")
        if self._bytes + len(body) > WAITING_BYTES:
            raise BadRequest(429, "too many requests wait; try again later")
        request = Accepted(seq, verb, body)
        self._store.accept(id, request)
        return self._enqueue(model, request).promise

    def _enqueue(self, model: Model, request: Accepted) -> Future:
        future = self._parts.futures.open(f"{model.id}:{request.seq}", model_id=model.id)
        model.waiting[request.seq] = request, future
        self._bytes += len(request.body)
        if not model.is_ready:
            asyncio.get_running_loop().call_later(GAP_S, self._give_up, model, request.seq)
        self._changed.notify()
        return future

    def _give_up(self, model: Model, seq: int) -> None:
        """Give up the requests before ``seq`` if the next one has not come."""
        while seq in model.waiting and not model.is_ready:
            text = f"request {model.next_seq} did not come within {GAP_S:g} s after a later one"
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
            await self._changed.until(lambda: any(each.is_ready for each in self._models.values()))
            for model in [each for each in self._models.values() if each.is_ready]:
                await self._take_turn(model)

    async def _take_turn(self, model: Model) -> None:
        for _ in range(TURN):
            if not model.is_ready:
                break
            await self._bring(model)
            request, future = model.waiting[model.next_seq]
            answer = await self._result(model, request)
            del model.waiting[request.seq]
            self._bytes -= len(request.body)
            model.next_seq += 1
            keep = request.verb in REPLAYED and request.seq > self._fact(model)["state_seq"]
            keep = keep and not (request.verb == "load_weights" and answer.is_failure)
            self._store.answer(model.id, request.seq, answer, keep=keep)
            self._parts.futures.settle(future, answer)
            if request.verb == "optim_step":
                await asyncio.to_thread(self._record, model, request.seq, answer)
                break
        if model.steps >= self._parts.state_every:
            await self._write_state(model)

    async def _result(self, model: Model, request: Accepted) -> Answer:
        """Run a request; return its answer."""
        try:
            if reason := self._fact(model)["failed"]:
                raise UserError(reason)
            run = getattr(self, f"_{request.verb}")
            given = {}
            if not request.verb.startswith("forward"):
                given = read(run, request.body, whole=request.verb not in REPLAYED[:2])
            answer: Answer = await run(model, request, **given)
            return answer
        except RankLost:
            raise
        except Exception as error:  # the server goes on
            is_users = isinstance(error, UserError | ConfigError)
            text = str(error) if is_users else said_by(error)
        if not is_users:
            self._parts.events.warn(f"{model.id}: {request.verb} {request.seq} failed: {text}")
        if request.seq == 0:
            self._set(model, failed=f"the model was not created: {text}")
        return Answer.failure(text, "user" if is_users else "server")

    def _fact(self, model: Model) -> Fact:
        return self._store.facts["model"][model.id]

    def _set(self, model: Model, **fields: Any) -> None:
        self._store.put("model", model.id, self._fact(model) | fields)

    async def _bring(self, model: Model) -> None:
        """Have the trainer hold the adapter of a model as its requests so far have left it."""
        is_here = self._here.pop(model.id, None) is not None
        while len(self._here) >= MAX_ADAPTERS:
            await self._send_away(next(iter(self._here.values())))
        self._here[model.id] = model
        if is_here:
            return
        fact = self._fact(model)
        model.changed = fact["state_seq"]
        model.steps = 0
        try:
            if fact["state"]:
                await self._session.create_adapter(model.id, adapter_of(fact["lora"]))
                await self._session.load_state(
                    self._checkpoints.at(fact["state"]), adapter=model.id
                )
            for request in await self._store.journal(model.id, model.changed + 1, model.next_seq):
                answer = await self._result(model, request)
                before = await self._store.answered(model.id, request.seq)
                if before is not None and answer.is_failure != before.is_failure:
                    raise UserError(f"request {request.seq} had another result, {answer.content!r}")
        except RankLost:
            raise
        except Exception as error:  # the other models go on
            self._set(model, failed=f"the model could not be restored: {said_by(error)}")

    async def _send_away(self, model: Model) -> None:
        """Have the trainer forget the adapter of a model, whose state is on disk then."""
        if model.changed > self._fact(model)["state_seq"]:
            await self._write_state(model)
        await self._forget(model)

    async def _forget(self, model: Model) -> None:
        """Have the trainer forget the adapter of a model. The next use brings it again."""
        del self._here[model.id]
        if model.id in self._session.adapters:
            await self._session.drop_adapter(model.id)

    async def _write_state(self, model: Model) -> Path:
        """Write the state of a model, and cut its journal; return the folder."""
        folder = self._checkpoints.new_folder()
        await self._session.save_state(folder, adapter=model.id)
        before = self._fact(model)["state"]
        self._set(model, state=folder.name, state_seq=model.changed)
        self._store.cut(model.id, model.changed)
        self._checkpoints.release(before)
        model.steps = 0
        return folder

    def _record(self, model: Model, seq: int, answer: Answer) -> None:
        """Write the metrics and samples of a step, which ``rl.view`` shows."""
        folder = self._parts.folder / model.id
        folder.mkdir(parents=True, exist_ok=True)
        row = {"step": seq, **json.loads(answer.content).get("metrics", {})}
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
        self._parts.samples.write(model.id, seq)

    # Verbs.

    async def _create_model(
        self, model: Model, request: Accepted, *, lora_config: Lora | None = None
    ) -> Answer:
        await self._create(model, (lora_config or Lora()).model_dump())
        model.changed = request.seq
        return Answer.of(model_id=model.id, type="create_model")

    async def _create(self, model: Model, lora: Fact) -> None:
        if lora["seed"] is None:
            digest = hashlib.blake2b(model.id.encode(), digest_size=4).digest()
            lora = lora | {"seed": int.from_bytes(digest)}
        self._set(model, lora=lora)
        await self._session.create_adapter(model.id, adapter_of(lora))

    async def _load_weights(
        self, model: Model, request: Accepted, *, path: Text, optimizer: bool
    ) -> Answer:
        found = self._checkpoints.find(path, "weights")
        if request.seq == 0:
            await self._create(model, found["lora"])
        ours, theirs = (
            adapter_of(each["lora"] | {"seed": 0}) for each in (self._fact(model), found)
        )
        if ours != theirs:
            raise UserError(f"{path} has another kind of adapter than the model")
        folder = self._checkpoints.at(found["folder"])
        try:
            await self._session.load_state(folder, adapter=model.id, optimizer=optimizer)
        except RunError:  # a part may be loaded
            await self._forget(model)
            raise
        model.changed = request.seq
        await self._write_state(model)  # the checkpoint may be deleted
        return Answer.of(path=path, model_id=model.id, type="load_weights")

    async def _forward_backward(self, model: Model, request: Accepted) -> Answer:
        message = parse_forward_backward(request.body)
        texts = [each.text for each in message.loss_fn_config_v2.values()]
        losses = self._store.facts["loss"]
        own = [id for id in texts if id in losses and id.startswith(self._fact(model)["session"])]
        graphs = {id: Graph.of(**losses[id]) for id in own}
        work = await asyncio.to_thread(prepare, message, self._parts.limits, graphs)
        forward = partial(self._session.forward, adapter=model.id)
        backward = partial(self._session.forward_backward, adapter=model.id)
        return Answer(await work.run(forward, backward), MEDIA_TYPE)

    _forward = _forward_backward

    async def _optim_step(
        self,
        model: Model,
        request: Accepted,
        *,
        adam_params: Adam | None = None,
        optimizer_params: Optimizer | None = None,
    ) -> Answer:
        given = adam_params or Adam()
        found = await self._session.optim_step(
            adapter=model.id,
            denominator=1.0,
            lr=given.learning_rate,
            betas=(given.beta1, given.beta2),
            eps=given.eps,
            weight_decay=given.weight_decay,
            max_norm=given.grad_clip_norm or math.inf,
        )
        model.changed = request.seq
        model.steps += 1
        metrics = {name: each for name, each in finite(dict(found)).items() if each is not None}
        return Answer.of(metrics=metrics, type="optim_step")

    async def _save(
        self,
        model: Model,
        request: Accepted,
        *,
        path: Text | None = None,
        overwrite: bool = False,
        ttl_seconds: Seconds = None,
        user_metadata: Metadata = None,
        sampling_session_seq_id: Number | None = None,
        kind: Literal["snapshot", "inflight"] = "snapshot",
        age_encryption_recipients: None = None,
    ) -> Answer:
        verb, place = request.verb, PLACES[request.verb]
        name = path or f"{request.seq:06d}"
        overwrites = overwrite or place != "weights"
        whole = self._checkpoints.path(model.id, place, name, overwrite=overwrites)
        folder = self._checkpoints.new_folder()
        if place == "weights":
            folder = await self._write_state(model)
        elif place == "external_weights":
            exported = self._checkpoints.new_folder()
            await self._session.export_hf(exported, adapter=model.id)
            (exported / "adapter").rename(folder)  # without the merged base model
            self._checkpoints.release(exported.name)
        else:
            await self._session.save_snapshot(folder, adapter=model.id)
        fact = self._fact(model)
        if path is None and sampling_session_seq_id is not None:
            id = f"{fact['session']}:sample:{sampling_session_seq_id}"
            self._add_sampler(model, id, folder.name, is_live=kind == "inflight")
            return Answer.of(sampling_session_id=id, type=verb)
        own = {"user_metadata": user_metadata, "expires": until(ttl_seconds)}
        own |= {name: fact[name] for name in ("base_model", "lora")}
        size = self._checkpoints.put(whole, folder, model=model.id, **own)
        return Answer.of(path=whole, size_bytes=size, type=verb)

    _save_weights = _save_weights_external = _save_weights_for_sampler = _save

    def _add_sampler(self, model: Model, id: str, folder: str, *, is_live: bool) -> None:
        """Add a sampler of the weights in ``folder``, or of the newest ones that are live."""
        fact = self._fact(model)
        sampler = {"base_model": fact["base_model"], "model_path": None, "folder": folder}
        sampler["run"] = model.id
        if is_live:
            self._set(model, live=folder)
            self._checkpoints.release(fact["live"])
            sampler |= {"folder": "", "model": model.id}
        self._store.put("sampler", id, sampler)


def adapter_of(lora: Fact) -> AdapterConfig:
    """Return the config of a model's adapter."""
    has = {ours: lora[theirs] for ours, theirs in TINKER_NAMES.items()}
    return AdapterConfig(rank=lora["rank"], seed=lora["seed"], **has)
