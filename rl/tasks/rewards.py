"""Rewards of several functions."""

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl.environments.task import RESERVED_METRICS, Score
from rl.errors import RunError, error_text, name_of, nearest, require, require_value
from rl.host.threads import in_thread
from rl.types import Completion, Prompt


@dataclass(eq=False)
class Rewards:
    """Weighted sum of reward functions. ::

        def right(prompt, text, completion):
            return float(text.strip() == prompt.answer)

        async def polite(prompt, text, completion):
            return await ask_a_judge(text)

        rewards = Rewards([right, polite], weights={"polite": 0.2})

        class MyTask(Task):
            async def score(self, prompt, text, completion):
                return await rewards.score(prompt, text, completion)

    Each value is a metric under the name of its function, without its weight. A completion is right
    if the value of the first function is at least 1. A function that returns None abstains; if all
    do, so does the reward. All functions run at once: coroutine functions
    on the event loop, and others in threads, at the same time for several completions too.

    A ``functools.partial`` has the name of its function, and an object with ``__call__`` that of
    its class, unless it has an attribute ``__name__``.

    Raises ConfigError if two functions share a name, or a weight has no function.
    """

    functions: Sequence[Callable[[Prompt, str, Completion], Any]]
    """Functions, or coroutine functions, that return a number or None."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Weights by name of the function; 1 for a function that is not named."""

    def __post_init__(self) -> None:
        names = [name_of(function) for function in self.functions]
        require(bool(names), "Rewards has no functions; give at least one")
        for place, name in enumerate(names):
            require(name not in names[:place], f"two rewards have the name {name!r}; rename one")
            rule = f"rename it, since {', '.join(RESERVED_METRICS)} are metrics of all tasks"
            require(name not in RESERVED_METRICS, f"a reward has the name {name!r}; {rule}")
        for name, weight in self.weights.items():
            known = f"{nearest(name, names)}the rewards are {', '.join(names)}"
            require(name in names, f"weights names {name!r}; {known}")
            require_value(math.isfinite(weight), f"the weight of {name}", weight, "finite")

    async def score(self, prompt: Prompt, text: str, completion: Completion) -> Score:
        """Return the weighted sum of all values, and each value as a metric."""
        names = [name_of(function) for function in self.functions]
        rewards = [_value(function, prompt, text, completion) for function in self.functions]
        pairs = zip(names, await asyncio.gather(*rewards), strict=True)
        values = {name: value for name, value in pairs if value is not None}
        reward = sum(self.weights.get(name, 1.0) * value for name, value in values.items())
        right = values.get(names[0], 0.0) >= 1
        return Score(reward=reward if values else None, correct=right, metrics=values)


async def _value(function: Callable[..., Any], *args: Any) -> float | None:
    try:
        if inspect.iscoroutinefunction(function):
            value = await function(*args)
        else:
            value = await asyncio.wrap_future(in_thread(function, *args))
            value = await value if inspect.isawaitable(value) else value
        return None if value is None else float(value)
    except (SystemExit, KeyboardInterrupt) as error:  # which would end the event loop
        raise RunError(f"{name_of(function)} raised {error_text(error)}") from None
