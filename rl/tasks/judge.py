"""A model as a judge: questions to a server with the API of OpenAI, within limits."""

import asyncio
import math
import os
import random
import re
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Annotated

from rl.errors import ConfigError, RunError, error_text, is_temporary, require, shown
from rl.types.rules import PERFORMANCE, YEAR_S, above, at_least

LONGEST_PAUSE_S = 60.0


@dataclass(kw_only=True, slots=True)
class JudgeConfig:
    """Server of a judge, and what it is asked. The limits hold for each process that scores."""

    url: str = "http://127.0.0.1:8000/v1"
    """Base URL of the API."""

    model: str = "policy"
    """Name of the model; ``policy`` is that of ``python -m rl.serve``."""

    key: str = ""
    """Name of the environment variable that holds the API key; empty: none is sent."""

    pattern: str = r"(?i)score:\s*(-?\d+(?:\.\d+)?)"
    """Regular expression whose first group is the number in an answer. The last match counts."""

    max_tokens: Annotated[int, at_least(1)] = 1024
    """Number of tokens that an answer has at most."""

    temperature: Annotated[float, at_least(0, 2)] = 0.0

    concurrent: Annotated[int, at_least(1), PERFORMANCE] = 32
    """Number of questions at once."""

    per_minute: Annotated[float, above(0, also=(0,)), PERFORMANCE] = 0
    """Number of requests in a minute; 0: as many as ``concurrent`` allows."""

    tries: Annotated[int, at_least(1)] = 5
    """Number of requests for a question before the judge abstains."""

    pause_s: Annotated[float, at_least(0, 3600), PERFORMANCE] = 1.0
    """Pause before the second request, in s; it doubles for each later one, and is at least what
    the server asks for."""

    timeout_s: Annotated[float, above(0, YEAR_S)] = 60.0
    """Time for an answer, in s."""

    cached: Annotated[int, at_least(0), PERFORMANCE] = 10_000
    """Number of latest answers that are kept: the same question is asked once."""


class Judge:
    """Asks a model for numbers, as a reward. ::

        judge = Judge(config.judge)
        value = await judge.score(f"Rate this from 0 to 1. End with 'Score: N'. {text}")

    None abstains: no answer came within ``tries``, or it has no number. A server that refuses the
    question, such as for a wrong key, raises RunError. Raises ConfigError for a pattern that cannot
    be used, or a key that is not set.
    """

    def __init__(self, config: JudgeConfig):
        try:
            self._pattern = re.compile(config.pattern)
        except re.error as error:
            raise ConfigError(f"judge.pattern is {config.pattern!r}: {error}") from None
        has_group = self._pattern.groups > 0
        require(has_group, f"judge.pattern is {config.pattern!r}; give it a group, the number")
        self._headers = {}
        if config.key:
            require(config.key in os.environ, f"judge.key names {config.key}, which is not set")
            self._headers["authorization"] = f"Bearer {os.environ[config.key]}"
        self._config = config
        self._answers: OrderedDict[str, asyncio.Task[str | None]] = OrderedDict()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next = 0.0  # monotonic time of the next request

    async def score(self, question: str) -> float | None:
        """Return the number in the answer to ``question``; None if there is none."""
        answer = await self.ask(question)
        marks = None if answer is None else [*self._pattern.finditer(answer)]
        try:
            value = float(marks[-1][1]) if marks else math.nan
        except (TypeError, ValueError):  # the group is not a number
            return None
        return value if math.isfinite(value) else None

    async def ask(self, question: str) -> str | None:
        """Return the answer to ``question``; None if none came."""
        self._enter()
        task = self._answers.pop(question, None)
        if task is None or _has_failed(task):
            task = asyncio.create_task(self._asked(question))
        self._answers[question] = task
        while len(self._answers) > self._config.cached:
            self._answers.popitem(last=False)
        return await asyncio.shield(task)  # others may wait for the same answer

    def _enter(self) -> None:
        """Take the client and the limits of the running event loop."""
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        import httpx

        self._loop = loop
        self._room = asyncio.Semaphore(self._config.concurrent)
        self._client = httpx.AsyncClient(timeout=self._config.timeout_s, headers=self._headers)
        for question in [name for name, task in self._answers.items() if not task.done()]:
            del self._answers[question]

    async def _asked(self, question: str) -> str | None:
        config = self._config
        pause = config.pause_s
        async with self._room:
            for number in range(config.tries):
                if number:
                    await asyncio.sleep(min(pause, LONGEST_PAUSE_S))
                    pause *= 2
                await self._turn()
                answer, asked_s = await self._request(question)
                if answer is not None:
                    return answer
                pause = max(pause * random.uniform(0.75, 1.25), asked_s)
        return None

    async def _turn(self) -> None:
        """Wait until the rate allows a request."""
        if self._config.per_minute:
            now = time.monotonic()
            begins = max(now, self._next)
            self._next = begins + 60 / self._config.per_minute
            await asyncio.sleep(begins - now)

    async def _request(self, question: str) -> tuple[str | None, float]:
        """Return the answer, None if another request may have one, and the least pause, in s."""
        import httpx

        config = self._config
        body = {
            "model": config.model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": config.max_tokens,
            "temperature": config.temperature,
        }
        url = f"{config.url.rstrip('/')}/chat/completions"
        try:
            answer = await self._client.post(url, json=body)
        except httpx.TransportError:
            return None, 0.0
        if is_temporary(answer.status_code):
            asked = answer.headers.get("retry-after", "")
            return None, float(asked) if asked.isdecimal() else 0.0
        if answer.is_error:
            said = shown(answer.text)
            raise RunError(f"the judge at {url} answered {answer.status_code}: {said}")
        try:
            content = answer.json()["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError) as error:
            raise RunError(f"the judge at {url} sent no completion: {error_text(error)}") from None
        return content if isinstance(content, str) else "", 0.0


def _has_failed(asked: "asyncio.Task[str | None]") -> bool:
    """Whether a question has ended without an answer."""
    return asked.done() and (
        asked.cancelled() or asked.exception() is not None or not asked.result()
    )
