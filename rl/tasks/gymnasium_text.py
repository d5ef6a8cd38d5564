"""Environments with gymnasium's ``reset`` and ``step``, whose observations and actions are text."""

from abc import abstractmethod
from typing import Any

from rl.tasks.environment import Message, MessageEnvironment, Opening, Reply
from rl.tasks.seeded import SeededTask
from rl.types import Prompt


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
        return _Episode(self, int(prompt.answer))


class _Episode(MessageEnvironment):
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
