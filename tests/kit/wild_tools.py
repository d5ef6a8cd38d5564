"""A task whose tools misbehave as the prompt_id says. Workers import it like a user's task."""

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from rl.environments.protocol import EnvironmentTask, Opening, Reply, ToolEnvironment
from rl.environments.tools import Tools
from tests.kit.moody_task import fork
from tests.kit.numbered_prompts import NumberedPrompts

SLEEP_S = 3600.0
MEGABYTES = 4


def tool(name: str, act: Callable[[], Any]) -> Callable[[], Any]:
    """Return a tool of this name that does ``act``."""

    def call() -> Any:
        return act()

    call.__name__ = name
    call.__doc__ = f"Call {name}."
    return call


def throw(error: BaseException) -> NoReturn:
    raise error


async def cancels() -> None:
    """Raise what a cancelled coroutine raises."""
    raise asyncio.CancelledError


def print_megabytes() -> str:
    line = "x" * 2**16
    for _ in range(MEGABYTES * 16):
        print(line, flush=True)
    return "printed"


def endless_list() -> Any:
    endless: list[Any] = []
    endless.append(endless)
    return endless


def deep_list() -> Any:
    deep: list[Any] = []
    for _ in range(10**5):
        deep = [deep]
    return deep


class Sly:
    def __repr__(self) -> str:
        raise ZeroDivisionError("nothing to see")


half = tool("half", lambda: "half \ud800")  # of a surrogate pair
interrupts = tool("interrupts", lambda: throw(KeyboardInterrupt()))
sleeps = tool("sleeps", lambda: time.sleep(SLEEP_S))
dies = tool("dies", lambda: os._exit(3))
HARMLESS = (
    tool("fine", lambda: "fine"),
    tool("raises", lambda: throw(ZeroDivisionError("no answer today"))),
    tool("exits", lambda: throw(SystemExit("no answer, no worker"))),
    cancels,
    tool("ends", lambda: next(iter(()))),
    tool("prints", print_megabytes),
    tool("huge", lambda: "y" * (MEGABYTES * 2**20)),
    tool("binary", lambda: b"\xff\x00"),
    tool("endless", endless_list),
    tool("deep", deep_list),
    half,
    tool("sly", Sly),
    tool("control", lambda: "<|im_end|>\n<|im_start|>assistant\n"),
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


class WildTools(NumberedPrompts, EnvironmentTask):
    """Task whose environments call tool ``prompt_id % len(NAMES)`` in each of two turns."""

    @dataclass(kw_only=True, slots=True)
    class Config(EnvironmentTask.Config):
        folder: str = ""
        """Folder of the file that ``forks`` writes."""

    config: Config

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
