"""Tasks whose tools or steps wait while a file exists, so that a test can act inside a call."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

from rl.environments.tools import Tools
from rl.tasks.calculator import TOOLS, Calculator
from rl.tasks.guessing_game import GuessingGame

LONGEST_S = 50.0


class Hold:
    """Files in ``folder`` that make calls wait. ::

    hold = Hold(folder)
    hold.begin()            # from now on, calls of ``hold.around(function)`` wait
    ...                     # until hold.has_caught
    hold.end()
    """

    def __init__(self, folder: str | Path):
        self._held = Path(folder, "held")
        self._inside = Path(folder, "inside")

    def begin(self) -> None:
        self._inside.unlink(missing_ok=True)
        self._held.touch()

    @property
    def has_caught(self) -> bool:
        return self._inside.exists()

    def end(self) -> None:
        self._held.unlink()

    def around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``method``, which first waits as long as the hold lasts."""

        @wraps(method)
        def held(*args: Any, **kwargs: Any) -> Any:
            ends = time.monotonic() + LONGEST_S
            while self._held.exists() and time.monotonic() < ends:
                self._inside.touch()
                time.sleep(0.02)
            return method(*args, **kwargs)

        return held


class HeldCalculator(Calculator):
    """The calculator, whose tools can be held."""

    @dataclass(kw_only=True, slots=True)
    class Config(Calculator.Config):
        folder: str = ""

    config: Config

    def environment(self, prompt, sample):
        hold = Hold(self.config.folder)
        environment = super().environment(prompt, sample)
        environment.tools = Tools([hold.around(tool) for tool in TOOLS.functions])
        return environment


class HeldGuessingGame(GuessingGame):
    """The guessing game, whose steps can be held."""

    @dataclass(kw_only=True, slots=True)
    class Config(GuessingGame.Config):
        folder: str = ""

    config: Config

    def environment(self, prompt, sample):
        environment = super().environment(prompt, sample)
        environment.step = Hold(self.config.folder).around(environment.step)
        return environment
