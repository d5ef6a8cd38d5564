"""Tasks of environments that other packages define: gymnasium, skyrl-gym and OpenEnv."""

import json
import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rl.environments.protocol import (
    EnvironmentTask,
    Message,
    MessageEnvironment,
    Opening,
    Reply,
    SeededTask,
)
from rl.errors import ConfigError, RunError, error_text, require_value, shown
from rl.host.process import without_proxy
from rl.model.shape import ModelConfig
from rl.types import Prompt

MAX_BYTES = 2**24
"""Maximum size of a message of the server."""
FIXES = {
    "CAPACITY_REACHED": "; each episode is a session: set task.max_open_episodes to the number of "
    "sessions of the server"
}
"""Advice for errors of the server, by their code."""


class GymnasiumTask(SeededTask):
    """Task whose episodes are those of an environment with gymnasium's methods. ::

        class Lake(GymnasiumTask):
            @dataclass(kw_only=True, slots=True)
            class Config(GymnasiumTask.Config):
                pass

            def make(self):
                return gymnasium.make("TextLake-v0")

    - ``reset(seed=…)`` gets the seed of the prompt; its observation is the first message.
    - ``step`` gets what ``action`` returns for an answer. Its reward is added to that of the
      episode, which ends if the environment terminates or truncates.
    - ``info["is_success"]`` of the last step tells whether the episode is solved. Without it, an
      episode that terminates with a positive reward is solved.

    The package gymnasium is needed only if the environment needs it.
    """

    @abstractmethod
    def make(self) -> Any:
        """Return a new environment. Runs in an environment worker."""

    def action(self, message: Message) -> Any:
        """Return the action for an answer of the policy; its text if not overridden."""
        return message["content"]

    def show(self, observation: Any) -> str:
        """Return an observation as text; ``str(observation)`` if not overridden."""
        return str(observation)

    def environment(self, prompt: Prompt, sample: int) -> MessageEnvironment:
        return _GymnasiumEpisode(self, int(prompt.answer))


class _GymnasiumEpisode(MessageEnvironment):
    def __init__(self, task: GymnasiumTask, seed: int):
        self._task = task
        self._seed = seed
        self._environment = task.make()

    def reset(self) -> Opening:
        observation, _ = self._environment.reset(seed=self._seed)
        return Opening([self._message(observation)])

    def step(self, message: Message) -> Reply:
        action = self._task.action(message)
        observation, reward, terminated, truncated, info = self._environment.step(action)
        solved = info.get("is_success", terminated and reward > 0)
        if terminated or truncated:
            return Reply(reward=float(reward), correct=bool(solved), done=True)
        return Reply(messages=[self._message(observation)], reward=float(reward))

    def close(self) -> None:
        self._environment.close()

    def _message(self, observation: Any) -> dict[str, str]:
        return {"role": "user", "content": self._task.show(observation)}


class SkyRLTask(EnvironmentTask):
    """Task whose episodes are those of a text environment of skyrl-gym. A subclass gives prompts as
    well. ::

        class Gsm8k(SkyRLTask):
            ...
            def make(self, prompt):
                extras = {"reward_spec": {"ground_truth": prompt.answer}, "max_turns": 4}
                return skyrl_gym.make("gsm8k_multi_turn", env_config=None, extras=extras)

    - ``init`` gets ``messages(prompt)`` and returns the first messages.
    - ``step`` gets the text of an answer. ``postprocessed_action`` has no effect, since tokens that
      were sampled stay as they are.
    - ``get_metrics()`` gives the metrics at the end; only numbers are kept.
    - An episode is solved if the reward of its last step is at least ``solved_at``.
    """

    solved_at = 1.0
    """Minimum reward of the last step of a solved episode."""

    @abstractmethod
    def make(self, prompt: Prompt) -> Any:
        """Return a new environment. Runs in an environment worker."""

    def messages(self, prompt: Prompt) -> Sequence[Message]:
        """Return the messages that ``init`` gets; the text of the prompt if not overridden."""
        return [{"role": "user", "content": prompt.text}]

    def environment(self, prompt: Prompt, sample: int) -> MessageEnvironment:
        return _SkyRLEpisode(self, prompt)


class _SkyRLEpisode(MessageEnvironment):
    def __init__(self, task: SkyRLTask, prompt: Prompt):
        self._messages = [*task.messages(prompt)]
        self._solved_at = task.solved_at
        self._environment = task.make(prompt)

    def reset(self) -> Opening:
        messages, _ = self._environment.init(self._messages)
        return Opening(messages)

    def step(self, message: Message) -> Reply:
        result = self._environment.step(message["content"])
        reward = float(result["reward"])
        if not result["done"]:
            return Reply(messages=result["observations"], reward=reward)
        metrics = {
            key: float(value)
            for key, value in self._environment.get_metrics().items()
            if isinstance(value, int | float)
        }
        return Reply(reward=reward, correct=reward >= self._solved_at, metrics=metrics, done=True)

    def close(self) -> None:
        self._environment.close()


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
        return _OpenEnvEpisode(self, int(prompt.answer))


class _OpenEnvEpisode(MessageEnvironment):
    def __init__(self, task: OpenEnvTask, seed: int):
        self._task = task
        self._url = task.config.url
        self._seed = seed
        self._socket: Any = None

    async def reset(self) -> Opening:
        from websockets.asyncio.client import connect
        from websockets.exceptions import WebSocketException

        os.environ.update(without_proxy())
        try:
            # task.step_s bounds the wait; a server that computes may answer no ping
            self._socket = await connect(self._url, max_size=MAX_BYTES, ping_interval=None)
        except (OSError, WebSocketException) as error:
            raise RunError(f"task.url {self._url}: cannot connect: {error_text(error)}") from None
        return Opening([self._message(await self._ask("reset", {"seed": self._seed}))])

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
            raise RunError(f"the connection to {self._url} ended: {error_text(error)}") from None
        try:
            answer = json.loads(text)
            content = answer["data"]
            if answer["type"] == "error":
                fix = FIXES.get(content.get("code"), "")
                raise RunError(f"the server at {self._url} failed: {content['message']}{fix}")
            content["observation"]
        except (ValueError, KeyError, TypeError):
            message = f"the server at {self._url} answered {shown(text)} to {kind}"
            raise RunError(f"{message}; expected data with an observation") from None
        return content

    def _message(self, answer: Mapping[str, Any]) -> dict[str, str]:
        return {"role": "user", "content": self._task.show(answer["observation"])}
