"""Environments that misbehave as the prompt_id says. Workers import them like a user's task."""

import asyncio
import os
import random
import signal
import time
from dataclasses import dataclass

from rl.environments.protocol import EnvironmentTask, MessageEnvironment, Opening, Reply
from tests.kit.adversary import reply
from tests.kit.conversations import TOOL, system, user
from tests.kit.numbered_prompts import NumberedPrompts

RAISES, RAISES_AT_RESET, NO_STEP, NAN, NO_MESSAGES, DIES, HANGS, HANGS_ASYNC, EXITS = range(
    100, 109
)
NO_OPENING, ASSISTANT, CLOSE_RAISES, LONG, TIMES_OUT = range(109, 114)
NO_REWARD = 114
"""Gives no reward for its second answer."""
FIRST_RAISES = 120
"""Its first sample raises in its first step."""
TURNS = 4


class Moody(NumberedPrompts, EnvironmentTask):
    """Adds 0.25 for each of four answers, the last of which ends the episode."""

    @dataclass(kw_only=True, slots=True)
    class Config(EnvironmentTask.Config):
        pass

    def environment(self, prompt, sample):
        kind = AsyncEnvironment if prompt.prompt_id % 2 else Environment
        return kind(prompt.prompt_id, sample)


class Environment(MessageEnvironment):
    def __init__(self, mood, sample):
        self.mood = RAISES if (mood, sample) == (FIRST_RAISES, 0) else mood
        self.rng = random.Random(f"{mood}/{sample}")
        self.answers = []
        self.is_closed = False

    def reset(self):
        if self.mood == RAISES_AT_RESET:
            raise ZeroDivisionError("no episode today")
        if self.mood == NO_OPENING:
            return "hello"
        text = "2 " * 2000 if self.mood == LONG else "What is 1 + 2?"
        return Opening([system("You add."), user(text)], [TOOL])

    def step(self, message):
        self.answers.append(message)
        match self.mood:
            case _ if self.mood == RAISES:
                raise ZeroDivisionError("no step today")
            case _ if self.mood == NO_STEP:
                return None
            case _ if self.mood == NAN:
                return Reply(reward=float("nan"), done=True)
            case _ if self.mood == NO_MESSAGES:
                return Reply()
            case _ if self.mood == ASSISTANT:
                return Reply(messages=[{"role": "assistant", "content": "me too"}])
            case _ if self.mood == DIES:
                os.kill(os.getpid(), signal.SIGKILL)
            case _ if self.mood == HANGS:
                time.sleep(3600)
            case _ if self.mood == TIMES_OUT:
                raise TimeoutError("no answer of the user's server")
            case _ if self.mood == EXITS:
                raise SystemExit("no step, no worker")
        if len(self.answers) == TURNS:
            return Reply(reward=0.25, done=True, correct=True, metrics={"mood": 1.0})
        calls = len(message.get("tool_calls", ()))
        silent = self.mood == NO_REWARD and len(self.answers) == 2
        return Reply(messages=reply(self.rng, calls), reward=None if silent else 0.25)

    def close(self):
        assert not self.is_closed
        self.is_closed = True
        if self.mood == CLOSE_RAISES:
            raise ZeroDivisionError("no end today")


class AsyncEnvironment(Environment):
    async def reset(self):
        await asyncio.sleep(0)
        return super().reset()

    async def step(self, message):
        if self.mood == HANGS_ASYNC:
            await asyncio.sleep(3600)
        return super().step(message)
