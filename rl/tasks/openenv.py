"""Environments of an OpenEnv server."""

import json
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rl.errors import ConfigError, RunError, require_value, said_by, shown
from rl.model.shape import ModelConfig
from rl.tasks.environment import Message, MessageEnvironment, Opening, Reply
from rl.tasks.seeded import SeededTask
from rl.types import Prompt

MAX_BYTES = 2**24
"""Maximum size of a message of the server."""
FIXES = {
    "CAPACITY_REACHED": "; each episode is a session: set task.max_open_episodes to the number of "
    "sessions of the server"
}
"""Advice for errors of the server, by their code."""


class OpenEnvTask(SeededTask):
    """Task whose episodes are sessions of an OpenEnv server, over its WebSocket. ::

        class Guess(OpenEnvTask):
            @dataclass(kw_only=True, slots=True)
            class Config(OpenEnvTask.Config):
                pass

            def action(self, message):
                return {"guess": message["content"].strip()}

            def show(self, observation):
                return observation["text"]

    - ``reset`` gets the seed of the prompt; its observation is the first message.
    - ``step`` gets what ``action`` returns for an answer. Its reward is added to that of the
      episode, which ends if ``done`` is true. It is solved if its last reward is above 0.
    - An error of the server, or a lost connection, costs the group of the episode.

    The package websockets is needed: ``pip install 'tiller-rl[environments]'``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(SeededTask.Config):
        url: str = ""
        """Address of the server's WebSocket, such as ``ws://127.0.0.1:8000/ws``."""

    config: Config

    def __init__(self, config: Config, *, seed: int, model: ModelConfig):
        super().__init__(config, seed=seed, model=model)
        rule = "the address of a WebSocket, such as ws://127.0.0.1:8000/ws"
        is_address = config.url.startswith(("ws://", "wss://"))
        require_value(is_address, "task.url", config.url, rule)
        try:
            import websockets  # noqa: F401
        except ModuleNotFoundError:
            raise ConfigError(
                f"{type(self).__name__} needs the package websockets: "
                "pip install 'tiller-rl[environments]'"
            ) from None

    @abstractmethod
    def action(self, message: Message) -> Mapping[str, Any]:
        """Return the action, as JSON data, for an answer of the policy."""

    def show(self, observation: Mapping[str, Any]) -> str:
        """Return an observation as text; its JSON text if not overridden."""
        return json.dumps(observation)

    def environment(self, prompt: Prompt, sample: int) -> MessageEnvironment:
        return _Session(self, int(prompt.answer))


class _Session(MessageEnvironment):
    def __init__(self, task: OpenEnvTask, seed: int):
        self._task = task
        self._url = task.config.url
        self._seed = seed
        self._socket: Any = None

    async def reset(self) -> Opening:
        from websockets.asyncio.client import connect
        from websockets.exceptions import WebSocketException

        try:
            # task.step_s bounds the wait; a server that computes may answer no ping
            self._socket = await connect(self._url, max_size=MAX_BYTES, ping_interval=None)
        except (OSError, WebSocketException) as error:
            raise RunError(f"task.url {self._url}: cannot connect: {said_by(error)}") from None
        first = await self._ask("reset", {"seed": self._seed})
        return Opening([self._message(first)])

    async def step(self, message: Message) -> Reply:
        answer = await self._ask("step", self._task.action(message))
        reward = float(answer.get("reward") or 0.0)
        if answer.get("done"):
            return Reply(reward=reward, correct=reward > 0, done=True)
        return Reply(messages=[self._message(answer)], reward=reward)

    async def close(self) -> None:
        if self._socket is not None:
            await self._socket.send(json.dumps({"type": "close"}))
            await self._socket.close()

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the data of the server's answer. Raises RunError if the server goes, reports an
        error or answers in another form.
        """
        from websockets.exceptions import ConnectionClosed

        request = json.dumps({"type": kind, "data": data})
        try:
            with suppress(ConnectionClosed):  # a server that refuses a session says why, and closes
                await self._socket.send(request)
            text = await self._socket.recv()
        except ConnectionClosed as error:
            raise RunError(f"the connection to {self._url} ended: {said_by(error)}") from None
        try:
            answer = json.loads(text)
            found = answer["data"]
            if answer["type"] == "error":
                fix = FIXES.get(found.get("code"), "")
                raise RunError(f"the server at {self._url} failed: {found['message']}{fix}")
            found["observation"]
        except (ValueError, KeyError, TypeError):
            message = f"the server at {self._url} answered {shown(text)} to {kind}"
            raise RunError(f"{message}; expected data with an observation") from None
        return found

    def _message(self, answer: Mapping[str, Any]) -> dict[str, str]:
        return {"role": "user", "content": self._task.show(answer["observation"])}
