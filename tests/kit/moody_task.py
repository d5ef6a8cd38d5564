"""A task whose reward misbehaves as the prompt_id says. Workers import it like a user's task."""

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rl.environments.task import Score, Task
from rl.types import Completion, Prompt
from tests.kit.forks import fork

RAISES, DIES, HANGS, SLOW, DIES_ONCE, EXITS, FORKS = range(100, 107)


class Moody(Task):
    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        folder: str = ""

    config: Config

    def prompt(self, prompt_id: int) -> Prompt:
        return Prompt(prompt_id=prompt_id, tokens=[1], text="", answer="")

    def eval_prompts(self, count: int) -> list[Prompt]:
        return []

    def decode(self, tokens: Sequence[int]) -> str:
        return str(os.getpid())

    def score(self, prompt: Prompt, text: str, completion: Completion) -> Score:
        flag = f"{self.config.folder}/died"
        match prompt.prompt_id:
            case _ if prompt.prompt_id == RAISES:
                raise ZeroDivisionError("no reward today")
            case _ if prompt.prompt_id == EXITS:
                raise SystemExit("no reward, no worker")
            case _ if prompt.prompt_id == FORKS:
                fork(self.config.folder)
            case _ if prompt.prompt_id == DIES:
                os.kill(os.getpid(), signal.SIGKILL)
            case _ if prompt.prompt_id == HANGS:
                time.sleep(3600)
            case _ if prompt.prompt_id == SLOW:
                time.sleep(0.05)
            case _ if prompt.prompt_id == DIES_ONCE and not os.path.exists(flag):
                open(flag, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
        return Score(reward=float(prompt.prompt_id), correct=True)


class Later(Moody):
    """Moody task whose reward is awaited; SLOW ones wait until 16 completions are being scored."""

    @dataclass(kw_only=True, slots=True)
    class Config(Moody.Config):
        pass

    begun = 0
    enough = None

    async def score(self, prompt: Prompt, text: str, completion: Completion) -> Score:
        if prompt.prompt_id == HANGS:
            await asyncio.sleep(3600)
        if prompt.prompt_id == SLOW:
            self.enough = self.enough or asyncio.Event()
            self.begun += 1
            if self.begun == 16:
                self.enough.set()
            await self.enough.wait()
        return Moody.score(self, prompt, text, completion)
