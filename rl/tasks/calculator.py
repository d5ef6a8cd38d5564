"""Calculator: an environment whose policy computes with tools."""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Annotated, Any

from rl.environments.protocol import EnvironmentTask, MessageEnvironment, Reply, ToolEnvironment
from rl.environments.tools import Tools
from rl.errors import RunError
from rl.types import Prompt
from rl.types.rules import at_least

HELD_OUT = 8
"""Inverse of the share of expressions that are held out, chosen by hash."""
TRIES = 1000
INSTRUCTION = "Compute it with the tools. End with the result."


def add(a: int, b: int) -> int:
    """Return a + b."""
    return a + b


def subtract(a: int, b: int) -> int:
    """Return a - b."""
    return a - b


def multiply(a: int, b: int) -> int:
    """Return a * b."""
    return a * b


OPERATIONS = {"+": add, "-": subtract, "*": multiply}
TOOLS = Tools([*OPERATIONS.values()])


class Calculator(EnvironmentTask):
    """Task whose policy computes expressions such as ``(17 + 4) * 23`` with tools.

    The reward is 1 if the last number of the last answer is the result, else 0.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(EnvironmentTask.Config):
        operations: Annotated[int, at_least(1, 100)] = 2
        """Number of operations of an expression."""

        largest: Annotated[int, at_least(1, 10**9)] = 99
        """Largest number of an expression; the smallest is 0."""

    config: Config

    def prompt(self, prompt_id: int) -> Prompt:
        draws = random.Random(f"calculator/{self.seed}/{prompt_id}")
        for _ in range(TRIES):
            text, result = self._expression(draws)
            if not is_held_out(text):
                return self.seed_prompt(prompt_id, text=text, answer=str(result))
        largest = self.config.largest
        raise RunError(f"task.largest: {largest} leaves no expression to train on; raise it")

    def eval_prompts(self, count: int) -> list[Prompt]:
        draws = random.Random("calculator")
        expressions = [self._expression(draws) for _ in range(TRIES + 2 * HELD_OUT * count)]
        held_out = {text: result for text, result in expressions if is_held_out(text)}
        return [
            self.seed_prompt(prompt_id, text=text, answer=str(result))
            for prompt_id, (text, result) in enumerate(islice(held_out.items(), count))
        ]

    def environment(self, prompt: Prompt, sample: int) -> MessageEnvironment:
        return _Sum(prompt)

    def _expression(self, draws: random.Random) -> tuple[str, int]:
        """Return an expression and its result."""
        result = draws.randint(0, self.config.largest)
        text = str(result)
        for number in range(self.config.operations):
            sign = draws.choice([*OPERATIONS])
            other = draws.randint(0, self.config.largest)
            text = f"({text}) {sign} {other}" if number else f"{text} {sign} {other}"
            result = OPERATIONS[sign](result, other)
        return text, result


class _Sum(ToolEnvironment):
    tools = TOOLS
    replayable = True

    def __init__(self, prompt: Prompt):
        self._prompt = prompt

    def begin(self) -> Sequence[Mapping[str, Any]]:
        return [{"role": "user", "content": question(self._prompt.text)}]

    def finish(self, message: Mapping[str, Any]) -> Reply:
        numbers = re.findall(r"-?\d+", message["content"])
        right = bool(numbers) and numbers[-1] == self._prompt.answer
        return Reply(reward=float(right), correct=right, done=True)


def question(text: str) -> str:
    """Return the user's message that asks for the result of the expression ``text``."""
    return f"{text} = ?\n{INSTRUCTION}"


def is_held_out(text: str) -> bool:
    """Whether training never sees the expression ``text``."""
    return blake2b(text.encode(), digest_size=8).digest()[0] % HELD_OUT == 0
