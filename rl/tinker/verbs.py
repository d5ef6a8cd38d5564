"""Verbs of the requests of models."""

import asyncio
import hashlib
import math
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rl.host.disk import replace_folder
from rl.observe.events import finite
from rl.tinker.checkpoints import until
from rl.tinker.errors import UserError
from rl.tinker.forward_backward import prepare
from rl.tinker.futures import Future
from rl.tinker.graph import Graph
from rl.tinker.parts import Parts
from rl.tinker.protocol import Adam, Lora, Metadata, Number, Optimizer, Seconds, Text
from rl.tinker.store import Accepted, Answer, Record
from rl.tinker.wire import MEDIA_TYPE, parse_forward_backward
from rl.training.trainer_config import TINKER_NAMES, AdapterConfig

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
    skipped: int = 0
    """Number of skipped steps since the last one that was taken."""
    used: float = field(default_factory=time.time)
    failed: str = ""
    """Why this process does not have the model; the next one tries again."""
    is_restoring: bool = False
    said: str = ""
    """Latest warning."""

    @property
    def is_ready(self) -> bool:
        """Whether a request can run."""
        return self.next_seq in self.waiting


class Verbs:
    """Requests of models, by their verbs. Each gets the model, whose adapter the trainer holds, the
    request, and the fields of its body; it returns the answer.
    """

    def __init__(self, parts: Parts):
        self._parts = parts
        self._session = parts.session
        self._store = parts.store
        self._checkpoints = parts.checkpoints

    def fact(self, model: Model) -> Record:
        """Return the facts about a model."""
        return self._store.facts["model"][model.id]

    def set(self, model: Model, **fields: Any) -> None:
        """Set facts about a model."""
        self._store.put("model", model.id, self.fact(model) | fields)

    async def write_state(self, model: Model) -> Path:
        """Write the state of a model, and cut its journal; return the folder."""
        with self._checkpoints.new_folder() as folder:
            await self._session.save_state(folder, adapter=model.id)
            before = self.fact(model)["state"]
            self.set(model, state=folder.name, state_seq=model.changed)
        self._store.cut(model.id, model.changed)
        self._checkpoints.release(before)
        model.steps = 0
        return folder

    async def create_model(
        self, model: Model, request: Accepted, *, lora_config: Lora | None = None
    ) -> Answer:
        await self._create(model, (lora_config or Lora()).model_dump())
        model.changed = request.seq
        return Answer.of(model_id=model.id, type="create_model")

    async def _create(self, model: Model, lora: Record) -> None:
        if lora["seed"] is None:
            digest = hashlib.blake2b(model.id.encode(), digest_size=4).digest()
            lora = lora | {"seed": int.from_bytes(digest)}
        self.set(model, lora=lora)
        await self._session.create_adapter(model.id, adapter_of(lora))

    async def load_weights(
        self, model: Model, request: Accepted, *, path: Text, optimizer: bool
    ) -> Answer:
        checkpoint = self._checkpoints.find(path, "weights")
        if request.seq == 0:
            await self._create(model, checkpoint["lora"])
        ours, theirs = (
            adapter_of(fact["lora"] | {"seed": 0}) for fact in (self.fact(model), checkpoint)
        )
        if ours != theirs:
            raise UserError(f"{path} has another kind of adapter than the model")
        folder = self._checkpoints.at(checkpoint["folder"])
        await self._session.load_state(folder, adapter=model.id, optimizer=optimizer)
        model.changed = request.seq
        await self.write_state(model)  # the checkpoint may be deleted
        return Answer.of(path=path, model_id=model.id, type="load_weights")

    async def forward_backward(self, model: Model, request: Accepted) -> Answer:
        message = parse_forward_backward(request.body)
        texts = [value.text for value in message.loss_fn_config_v2.values()]
        losses = self._store.facts["loss"]
        used = [id for id in texts if id in losses and id.startswith(self.fact(model)["session"])]
        graphs = {id: Graph.of(**losses[id]) for id in used}
        work = await asyncio.to_thread(prepare, message, self._parts.limits, graphs)
        forward = partial(self._session.forward, adapter=model.id)
        backward = partial(self._session.forward_backward, adapter=model.id)
        content = await work.run(forward, backward, self._parts.custom_losses.differentiate)
        return Answer(content, MEDIA_TYPE)

    forward = forward_backward

    async def optim_step(
        self,
        model: Model,
        request: Accepted,
        *,
        adam_params: Adam | None = None,
        optimizer_params: Optimizer | None = None,
    ) -> Answer:
        adam = adam_params or Adam()
        result = await self._session.optim_step(
            adapter=model.id,
            denominator=1.0,
            lr=adam.learning_rate,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.weight_decay,
            max_norm=adam.grad_clip_norm or math.inf,
        )
        model.changed = request.seq
        model.steps += 1
        metrics = {name: value for name, value in finite(dict(result)).items() if value is not None}
        is_skipped = "trainer/grad_norm" not in metrics
        model.skipped = model.skipped + 1 if is_skipped else 0
        if model.skipped > self._parts.max_skipped:
            await self.write_state(model)  # a request that failed is not run again
            raise UserError(
                f"{model.skipped} steps in a row were skipped because the gradient was not finite; "
                "lower the learning rate or load an earlier state"
            )
        metrics["trainer/skipped_in_a_row"] = float(model.skipped)
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
        with self._checkpoints.new_folder() as folder, self._checkpoints.new_folder() as exported:
            if place == "weights":
                folder = await self.write_state(model)
            elif place == "external_weights":
                await self._session.export_hf(exported, adapter=model.id)
                replace_folder(folder, exported / "adapter")  # without the merged base model
            else:
                await self._session.save_snapshot(folder, adapter=model.id)
            fact = self.fact(model)
            if path is None and sampling_session_seq_id is not None:
                id = f"{fact['session']}:sample:{sampling_session_seq_id}"
                self._add_sampler(model, id, folder.name, is_live=kind == "inflight")
                return Answer.of(sampling_session_id=id, type=verb)
            facts = {"user_metadata": user_metadata, "expires": until(ttl_seconds)}
            facts |= {name: fact[name] for name in ("base_model", "lora")}
            size = self._checkpoints.put(whole, folder, model=model.id, **facts)
        return Answer.of(path=whole, size_bytes=size, type=verb)

    save_weights = save_weights_external = save_weights_for_sampler = _save

    def _add_sampler(self, model: Model, id: str, folder: str, *, is_live: bool) -> None:
        """Add a sampler of the weights in ``folder``, or of the newest ones that are live."""
        fact = self.fact(model)
        sampler = {"base_model": fact["base_model"], "model_path": None, "folder": folder}
        sampler["run"] = model.id
        if is_live:
            self.set(model, live=folder)
            self._checkpoints.release(fact["live"])
            sampler |= {"folder": "", "model": model.id}
        self._store.put("sampler", id, sampler)


def adapter_of(lora: Record) -> AdapterConfig:
    """Return the config of a model's adapter."""
    has = {ours: lora[theirs] for ours, theirs in TINKER_NAMES.items()}
    return AdapterConfig(rank=lora["rank"], seed=lora["seed"], **has)
