"""Guessing game: an environment of several turns without tools."""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Annotated, Any

from rl.environments.protocol import EnvironmentTask, MessageEnvironment, Opening, Reply
from rl.types import Prompt
from rl.types.rules import at_least

HELD_OUT = 5
"""Inverse of the share of numbers that are held out, chosen by hash."""


class GuessingGame(EnvironmentTask):
    """Task whose policy guesses a number, and is told after each guess whether the number is higher
    or lower.

    The reward is 1 for the right guess at once, and less by ``turn_cost`` for each guess before.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(EnvironmentTask.Config):
        numbers: Annotated[int, at_least(2, 10**6)] = 100
        """Upper limit of the numbers to guess, exclusive. The lowest number is 0."""

        turn_cost: Annotated[float, at_least(0, 1)] = 0.1
        """Amount that each wrong guess takes from the reward, which is at least 0."""

    config: Config

    def prompt(self, prompt_id: int) -> Prompt:
        draws = random.Random(f"guessing game/{self.seed}/{prompt_id}")
        while is_held_out(number := draws.randrange(self.config.numbers)):
            pass
        return self.seed_prompt(prompt_id, text=f"guess {number}", answer=str(number))

    def eval_prompts(self, count: int) -> list[Prompt]:
        numbers = islice(filter(is_held_out, range(self.config.numbers)), count)
        return [
            self.seed_prompt(prompt_id, text=f"guess {number}", answer=str(number))
            for prompt_id, number in enumerate(numbers)
        ]

    def environment(self, prompt: Prompt, sample: int) -> MessageEnvironment:
        return _Game(int(prompt.answer), self.config)


class _Game(MessageEnvironment):
    replayable = True

    def __init__(self, number: int, config: GuessingGame.Config):
        self._number = number
        self._config = config
        self._guesses = 0

    def reset(self) -> Opening:
        last = self._config.numbers - 1
        text = f"I think of a number from 0 to {last}. Guess it."
        return Opening([{"role": "user", "content": text}])

    def step(self, message: Mapping[str, Any]) -> Reply:
        guess = re.search(r"\d+", message["content"])
        if guess is None:
            return _reply("Write a number.")
        self._guesses += 1
        value = int(guess.group()[:12])
        if value == self._number:
            reward = max(0.0, 1.0 - self._config.turn_cost * (self._guesses - 1))
            return Reply(reward=reward, correct=True, done=True)
        return _reply("higher" if value < self._number else "lower")


def _reply(text: str) -> Reply:
    return Reply(messages=[{"role": "user", "content": text}])


def is_held_out(number: int) -> bool:
    """Whether training never sees ``number``."""
    return blake2b(str(number).encode(), digest_size=8).digest()[0] % HELD_OUT == 0
