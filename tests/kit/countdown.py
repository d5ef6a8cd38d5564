"""A text environment of gymnasium, and a task of it."""

import random
import string
from dataclasses import dataclass
from typing import ClassVar

import gymnasium

from rl.environments.adapters import GymnasiumTask


class Countdown(gymnasium.Env):
    """The policy counts down from a number of the seed. Each number is worth 0.5."""

    observation_space = gymnasium.spaces.Text(64, charset=string.printable)
    action_space = gymnasium.spaces.Text(1024, charset=string.printable)
    closed: ClassVar[list[int]] = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number = self.begin = random.Random(seed).randint(1, 9)
        return f"Count down from {self.number}.", {}

    def step(self, action):
        right = action.strip() == str(self.number)
        self.number -= 1
        return "Go on.", 0.5 * right, self.number == 0, not right, {}

    def close(self):
        self.closed.append(self.begin)


class CountdownTask(GymnasiumTask):
    @dataclass(kw_only=True, slots=True)
    class Config(GymnasiumTask.Config):
        pass

    def make(self):
        return gymnasium.wrappers.PassiveEnvChecker(Countdown())
