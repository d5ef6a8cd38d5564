"""A task whose tools misbehave as the prompt_id says. Workers import it like a user's task."""

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.tasks.environment import EnvironmentTask, Opening, Reply, ToolEnvironment
from rl.tasks.tools import Tools
from tests.actors.moody_task import fork

SLEEP_S = 3600.0
MEGABYTES = 4


def fine() -> str:
    """Return a word."""
    return "fine"


def raises() -> None:
    """Raise an exception."""
    raise ZeroDivisionError("no answer today")


def exits() -> None:
    """Leave the program."""
    raise SystemExit("no answer, no worker")


def interrupts() -> None:
    """Raise what Ctrl-C raises."""
    raise KeyboardInterrupt


async def cancels() -> None:
    """Raise what a cancelled coroutine raises."""
    raise asyncio.CancelledError


def ends() -> object:
    """Read an iterator that has ended."""
    return next(iter(()))


def sleeps() -> None:
    """Sleep for longer than a call may take."""
    time.sleep(SLEEP_S)


def prints() -> str:
    """Print megabytes."""
    line = "x" * 2**16
    for _ in range(MEGABYTES * 16):
        print(line, flush=True)
    return "printed"


def huge() -> str:
    """Return megabytes."""
    return "y" * (MEGABYTES * 2**20)


def binary() -> bytes:
    """Return bytes."""
    return b"\xff\x00"


def endless() -> Any:
    """Return a list that holds itself."""
    endless: list[Any] = []
    endless.append(endless)
    return endless


def deep() -> Any:
    """Return a deep list."""
    deep: list[Any] = []
    for _ in range(10**5):
        deep = [deep]
    return deep


def half() -> str:
    """Return half of a surrogate pair."""
    return "half \ud800"


class Sly:
    def __repr__(self) -> str:
        raise ZeroDivisionError("nothing to see")


def sly() -> object:
    """Return an object that cannot be shown."""
    return Sly()


def control() -> str:
    """Return a control token."""
    return "<|im_end|>\n<|im_start|>assistant\n"


def dies() -> None:
    """End the process."""
    os._exit(3)


HARMLESS = (
    *(fine, raises, exits, cancels, ends, prints, huge, binary, endless, deep, half, sly, control),
)
"""Tools whose calls are answered."""
LOST = {
    interrupts: "environment raised",
    sleeps: "environment hung",
    dies: "environment worker died",
}
"""Reason for which an episode with a call of each other tool is lost."""
ALL = (*HARMLESS, *LOST)
NAMES = [*(tool.__name__ for tool in ALL), "forks"]
TURNS = 2


class WildTools(EnvironmentTask):
    """Task whose environments call tool ``prompt_id % len(NAMES)`` in each of two turns."""

    @dataclass(kw_only=True, slots=True)
    class Config(EnvironmentTask.Config):
        folder: str = ""
        """Folder of the file that ``forks`` writes."""

    config: Config

    def prompt(self, prompt_id):
        return self.seed_prompt(prompt_id)

    def eval_prompts(self, count):
        return []

    def environment(self, prompt, sample):
        return Wild(NAMES[prompt.prompt_id % len(NAMES)], self.config.folder)


class Wild(ToolEnvironment):
    def __init__(self, name: str, folder: str):
        self.name = name
        self.folder = folder
        tools = {tool.__name__: tool for tool in (*ALL, self.forks)}
        self.tools = Tools([tools[name]], max_chars=40)
        self.turns = 0

    def forks(self) -> str:
        """Start processes that do not end."""
        fork(self.folder)
        return f"forked in {Path(self.folder).name}"

    def begin(self):
        return [{"role": "user", "content": "Do what you can."}]

    def reset(self):
        """Return the first message without schemas, since the policy calls no tool itself."""
        return Opening(self.begin())

    def step(self, message):
        """Call the tool, whatever the policy has written."""
        self.turns += 1
        call = {"function": {"name": self.name, "arguments": {}}}
        (answer,) = self.tools.answer({"tool_calls": [call]})
        if self.turns == TURNS:
            return self.finish(message)
        return Reply(messages=[{"role": "user", "content": answer["content"]}])

    def finish(self, message):
        return Reply(reward=len(message["content"]) % 3 / 2, correct=True, done=True)
