"""Tasksets of the package verifiers, served by its EnvServer."""

import asyncio
import json
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import msgspec
import zmq
import zmq.asyncio

from rl.data.jsonl import read_rows
from rl.data.order import choose_held_out, epoch_index, text_hash
from rl.data.sources import HeldOutConfig, SourceConfig, open_source
from rl.data.stored import kept, parted
from rl.environments.agent import AgentTask, Api
from rl.environments.protocol import Reply
from rl.errors import RunError, require_value, shown
from rl.model.shape import ModelConfig
from rl.types import Prompt
from rl.types.rules import SHARE, SIGNED

ANSWER_S = 30.0
"""Time for the server to answer that it is well."""


class VerifiersTask(AgentTask):
    """Task whose episodes an EnvServer of verifiers runs, with the taskset and harness that it
    serves.

    The server runs where you start it, in a Python environment of its own. It samples by the API of
    :class:`AgentTask`, so its host must reach the hosts of the environment workers.

    - A row has the data of one task, as verifiers writes it.
    - The reward is the sum of score × weight over the taskset's rewards. Scores and metrics are
      reported by name.
    - An episode is solved if its reward is at least ``solved_at``.
    - An episode with an error in verifiers costs its group, unless a limit of this task ended it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(AgentTask.Config, HeldOutConfig):
        address: str = "tcp://127.0.0.1:5000"
        """Address of the EnvServer, as ZeroMQ writes it."""

        renderer: str = "qwen3"
        """Name of the renderer by which the server writes prompts, as in the package renderers."""

        held_out_fraction: Annotated[float, SHARE] = 0.1
        """Share of the tasks that are held out for evaluation, chosen by their hash."""

        solved_at: Annotated[float, SIGNED] = 1.0
        """Minimum reward of a solved episode."""

    config: Config
    can_only_score: ClassVar[bool] = True

    def __init__(self, config: Config, *, seed: int, model: ModelConfig, only_scores: bool = False):
        super().__init__(config, seed=seed, model=model)
        is_address = config.address.startswith(("tcp://", "ipc://"))
        rule = "an address of ZeroMQ, such as tcp://127.0.0.1:5000"
        require_value(is_address, "task.address", config.address, rule)
        self._env_server: _EnvServer | None = None
        if only_scores:
            return
        rows = self._read(config, "task.path")
        if other := config.held_out():
            self._train, self._held_out = rows, self._read(other, "task.held_out_path")
            return
        hashes = [text_hash(text) for text, _ in rows]
        held_out = choose_held_out(hashes, config.held_out_fraction, "task.path", config.path)
        self._train, self._held_out = parted(rows, held_out)

    def _read(self, source: SourceConfig, field: str) -> Sequence[tuple[str, str]]:
        table = open_source(source, field)
        rows = read_rows(table, field=field, form='{"prompt": …, …}')
        read = ((row.value.get("prompt"), json.dumps(row.value)) for row in rows)
        tasks = ((text if isinstance(text, str) else json.dumps(text), data) for text, data in read)
        return kept(tasks, table)

    def prompt(self, prompt_id: int) -> Prompt:
        text, data = self._train[epoch_index(self.seed, prompt_id, len(self._train))]
        return self.seed_prompt(prompt_id, text=text, answer=data)

    def eval_prompts(self, count: int) -> list[Prompt]:
        return [
            self.seed_prompt(place, text=text, answer=data)
            for place, (text, data) in enumerate(self._held_out[:count])
        ]

    async def agent(self, prompt: Prompt, api: Api) -> Reply:
        """Have the server run one episode. Raises RunError if the episode failed there."""
        server = await self._connected()
        sampling: dict[str, Any] = {"extra_args": {"session": api.session}}
        if not self.config.enable_thinking:
            sampling["chat_template_kwargs"] = {"enable_thinking": False}
        client = {
            "type": "train",
            "base_url": api.server_url,
            "api_key_var": "TILLER_GATEWAY_KEY",
            "headers": {"Authorization": f"Bearer {api.key}"},
            "renderer": {"name": self.config.renderer},
            "renderer_model_name": os.path.abspath(self.dialect.tokenizer.name_or_path),
        }
        request = {
            "task_data": json.loads(prompt.answer),
            "client": client,
            "model": "policy",
            "sampling": sampling,
        }
        return self._scored(*await server.request("run", request))

    def _scored(self, reply: Mapping[str, Any], traces: list[Mapping[str, Any]]) -> Reply:
        errors = [*reply["head"]["errors"]]
        errors += [error for trace in traces for error in trace["errors"]]
        if errors:
            message = f"{errors[-1]['type']}: {errors[-1]['message']}"
            raise RunError(f"verifiers at {self.config.address} failed an episode: {message}")
        if len(traces) != 1:
            raise RunError(f"an episode of verifiers has {len(traces)} agents; Tiller trains one")
        (trace,) = traces
        rewards = trace.get("rewards") or {}
        if not rewards or None in rewards.values():
            raise RunError(f"verifiers returned the rewards {shown(rewards)}; each needs a score")
        reward = sum(term["score"] * term["weight"] for term in rewards.values())
        metrics = {name: float(term["score"]) for name, term in rewards.items()}
        numbers = trace.get("metrics") or {}
        metrics |= {name: float(value) for name, value in numbers.items() if value is not None}
        return Reply(reward=reward, correct=reward >= self.config.solved_at, metrics=metrics)

    async def _connected(self) -> "_EnvServer":
        """Return the connection of this process, which ends with the event loop."""
        if self._env_server is None or not self._env_server.is_open:
            server = self._env_server = _EnvServer(self.config.address)
            try:
                async with asyncio.timeout(ANSWER_S):
                    await server.request("health", {})
            except TimeoutError:
                self._env_server = None
                raise RunError(
                    f"task.address {self.config.address}: no EnvServer of verifiers answers "
                    f"within {ANSWER_S:g} s; start one there"
                ) from None
        return self._env_server


@dataclass
class _Call:
    reply: asyncio.Future[Mapping[str, Any]]
    traces: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Errors and scores of each trace, by its id."""

    def take(self, kind: bytes, body: Mapping[str, Any]) -> None:
        """Note an answer of the server."""
        if kind == b"reply":
            self.reply.set_result(body)
            return
        trace = self.traces.setdefault(body["trace"], {"errors": []})
        trace["errors"] += body.get("errors", [])
        trace |= body.get("set", {})


class _EnvServer:
    """Connection to an EnvServer.

    A request is the frames id, method and body. Its answers are the frames id, ``delta`` or
    ``reply``, and body. Bodies are in msgpack.
    """

    def __init__(self, address: str):
        self._calls: dict[bytes, _Call] = {}
        self._loop = asyncio.get_running_loop()
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)
        self._reader = asyncio.create_task(self._read())

    @property
    def is_open(self) -> bool:
        """Whether the connection can be used in the running event loop."""
        return self._loop is asyncio.get_running_loop() and not self._reader.done()

    async def request(
        self, method: str, body: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], list[Mapping[str, Any]]]:
        """Return the server's reply and the traces of the request. A call that is cancelled is
        cancelled at the server too.
        """
        name = uuid.uuid4().hex.encode()
        call = self._calls[name] = _Call(self._loop.create_future())
        try:
            await self._send(name, method, body)
            reply = await call.reply
        except asyncio.CancelledError:
            await self._send(uuid.uuid4().hex.encode(), "cancel", {"request_id": name.decode()})
            raise
        finally:
            del self._calls[name]
        if not reply["success"]:
            raise RunError(f"verifiers refused {method}: {reply['error']}")
        return reply, [*call.traces.values()]

    async def _send(self, name: bytes, method: str, body: Mapping[str, Any]) -> None:
        await self._socket.send_multipart([name, method.encode(), msgspec.msgpack.encode(body)])

    async def _read(self) -> None:
        with self._socket:
            while True:
                name, kind, data = await self._socket.recv_multipart()
                if name in self._calls:  # it was not cancelled
                    self._calls[name].take(kind, msgspec.msgpack.decode(data))
