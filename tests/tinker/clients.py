"""A server over a toy session, and clients of its protocol."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from rl.cli.arguments import find_config
from rl.config import ServeConfig
from rl.gateway.http import make_app
from rl.model.shape import ModelConfig
from rl.observe.events import Events
from rl.tinker.app import routes_of
from rl.tinker.schema import pb
from rl.tinker.server import Server
from tests.tinker.bodies import answer_of, request
from tests.tinker.toy import LONGEST, VOCAB, ToySession

BASE = "tiny"
JSON = {"content-type": "application/json"}
PROTO = "application/x-protobuf"
LORA = {"rank": 4, "seed": 3, "train_unembed": False}


def config_of(**options: Any) -> ServeConfig:
    config = find_config("serve_tiny")()
    config.names = (BASE, "other/name")
    config.model = ModelConfig(vocab_size=VOCAB, max_seq_len=LONGEST)
    for name, value in options.items():
        setattr(config, name, value)
    return config


class Running:
    """A server in this process, with ``session``. ``async with`` ends it properly; ``kill`` ends it
    as the kernel would, with what it has on disk.
    """

    def __init__(self, folder: Path, session: Any = None, *, key: str | None = None, **options):
        self.session = session or ToySession()
        self._folder = folder
        self._key = key
        self._options = options

    async def __aenter__(self) -> "Running":
        self._folder.mkdir(parents=True, exist_ok=True)
        self.warnings: list[str] = []
        events = Events(lambda event: self.warnings.append(event["text"]))
        config = config_of(**self._options)
        self.server = Server(config, self.session, self._folder, events, stop_token_ids=(0,))
        self._work = asyncio.create_task(self.server.run())
        await self.server.samplers.running.wait()
        app = make_app(None, self._key, routes_of(self.server, self._key))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()
        await self.server.parts.store.close()

    async def _end(self) -> None:
        own = asyncio.current_task()
        others = [each for each in asyncio.all_tasks() if each is not own and each in self._tasks()]
        for each in others:
            each.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self.http.aclose()

    def _tasks(self) -> list[asyncio.Task]:
        samples = (each.task for each in self.server.parts.futures._all.values() if each.task)
        return [self._work, *samples]

    async def kill(self) -> None:
        """End the server; what it has not written is lost."""
        store = self.server.parts.store
        store._waiting.clear()
        await self._end()
        store._waiting.clear()
        if store._writing is not None:
            await store._writing  # a commit that the kernel still makes
        await store._in_thread(store._database.close)

    async def post(self, path: str, body: Any = None, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        return await self.http.post(f"/api/v1/{path}", content=content, headers=JSON | headers)

    async def ask(self, path: str, body: Any = None, **headers: str) -> Any:
        """Return the JSON of a request that works."""
        answer = await self.post(path, body, **headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def get(self, path: str, verb: str = "GET", body: Any = None) -> Any:
        content = b"" if body is None else json.dumps(body).encode()
        answer = await self.http.request(verb, f"/api/v1/{path}", content=content, headers=JSON)
        assert answer.status_code in (200, 204), answer.text
        return answer.json() if answer.content else None

    async def result(self, promise: Mapping[str, Any]) -> Any:
        """Return the result of a promise: JSON, or the bytes of a message."""
        while True:
            body = {"request_id": promise["request_id"]}
            answer = await self.post("retrieve_future", body)
            if answer.status_code != 408:
                break
        assert answer.status_code == 200, answer.text
        is_proto = answer.headers["content-type"] == PROTO
        return answer.content if is_proto else answer.json()

    async def open(self, number: int = 0) -> str:
        """Return the id of a new session."""
        body = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}
        key = {"x-idempotency-key": f"session {number}"}
        return (await self.ask("create_session", body, **key))["session_id"]

    async def train(self, number: int = 0, *, model: int = 0, lora: Any = None) -> "Training":
        """Return a client of a new model."""
        client = Training(self, await self.open(number), model)
        body = client.creation | {"base_model": BASE, "lora_config": lora or LORA}
        created = await self.result(await self.ask("create_model", body))
        assert created["model_id"] == client.id
        return client


class Training:
    """Client of one model, which counts its requests."""

    def __init__(self, running: Running, session: str, model: int = 0):
        self.running = running
        self.session = session
        self.creation = {"session_id": session, "model_seq_id": model}
        self.id = f"{session}:train:{model}"
        self.numbers = itertools.count(1)

    def data(self, *tokens: int, loss: str = "cross_entropy", seq: int = 0, **options) -> bytes:
        """Return the body of a request that trains on ``tokens``."""
        given = [*tokens]
        inputs = {"target_tokens": [*given[1:], 1], "weights": [1.0] * len(given)}
        message = request([(given, inputs)], loss, **options)
        message.model_id = self.id
        message.seq_id = seq or next(self.numbers)
        return message.SerializeToString()

    async def backward(self, *tokens: int, **options) -> dict[str, Any]:
        """Return the promise of a gradient."""
        body = self.data(*tokens, **options)
        kind = {"content-type": PROTO}
        return await self.running.ask("forward_backward", body, **kind)

    async def call(self, verb: str, seq: int = 0, **fields: Any) -> dict[str, Any]:
        """Return the promise of a request of JSON."""
        body = {"model_id": self.id, "seq_id": seq or next(self.numbers), **fields}
        return await self.running.ask(verb, body)

    async def step(self, lr: float = 0.1, seq: int = 0) -> dict[str, Any]:
        """Return the promise of an optimizer step."""
        params = {"learning_rate": lr, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}
        return await self.call("optim_step", seq, adam_params=params | {"grad_clip_norm": 0.0})

    async def done(self, promise: Mapping[str, Any]) -> Any:
        """Return the result of a promise."""
        return await self.running.result(promise)

    async def learn(self, *tokens: int) -> Any:
        """Take a step on the gradient of ``tokens``; return the answer to the gradient."""
        answer = await self.done(await self.backward(*tokens))
        assert "metrics" in await self.done(await self.step())
        return answer

    async def saved(self, name: str, verb: str = "save_weights", seq: int = 0) -> str:
        """Return the path of a new checkpoint."""
        return (await self.done(await self.call(verb, seq, path=name)))["path"]

    async def logprobs(self, *tokens: int) -> np.ndarray:
        """Return the log-probs of a forward pass, which tell weights apart."""
        found = await self.done(await self.backward(*tokens, only=True))
        return answer_of(found)[0][0]

    async def weights(self) -> str:
        """Return the digest of the weights of a toy adapter, in order after all before."""
        seq = next(self.numbers)
        path = await self.saved(f"probe{seq}", "save_weights_for_sampler", seq)
        checkpoints = self.running.server.parts.checkpoints
        folder = checkpoints.at(checkpoints.find(path)["folder"])
        return json.loads((folder / "state.json").read_text())["weights"]


def sample_of(data: bytes) -> Any:
    """Return a message SampleResponse."""
    message = pb.SampleResponse()
    message.ParseFromString(data)
    return message


@contextlib.contextmanager
def shortened(module: Any, **seconds: float):
    """Replace constants of a module inside the block."""
    before = {name: getattr(module, name) for name in seconds}
    vars(module).update(seconds)
    try:
        yield
    finally:
        vars(module).update(before)
