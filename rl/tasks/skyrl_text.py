"""Environments of the package skyrl-gym."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from rl.tasks.environment import (
    EnvironmentTask,
    Message,
    MessageEnvironment,
    Opening,
    Reply,
)
from rl.types import Prompt


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
        return _Episode(self, prompt)


class _Episode(MessageEnvironment):
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
        metrics = _numbers(self._environment.get_metrics())
        return Reply(reward=reward, correct=reward >= self._solved_at, metrics=metrics, done=True)

    def close(self) -> None:
        self._environment.close()


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {key: float(each) for key, each in metrics.items() if isinstance(each, int | float)}
