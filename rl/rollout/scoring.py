"""Scores of one prompt's completions by the user's task, checked and converted to plain types."""

import asyncio
import inspect
import math
from collections import abc
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import cast, get_args

import numpy as np
import torch

from rl.environments.task import RESERVED_METRICS, Score, Task
from rl.errors import GroupLost, error_text, shown, trace_of, type_of
from rl.metrics import Entry, Reduction, Value
from rl.types import Completion, Prompt, Rollout

Scored = list[tuple[str, Score]]
"""Text and score of each completion of a group."""

FLOAT32_MAX = torch.finfo(torch.float32).max


class InvalidScore(Exception):
    """A part of a score cannot be used; the message shows it."""


def score_group(task: Task, prompt: Prompt, completions: abc.Sequence[Completion]) -> Scored:
    """Return text and score of each completion; all numbers are plain floats, finite in float32.

    Raises GroupLost, naming the completion, if the task's ``decode`` or ``score`` raises anything,
    or returns something other than text and a :class:`Score` that follows its own rules. A
    coroutine function ``score`` runs on an event loop of its own.
    """
    if is_async(task):
        return asyncio.run(score_awaited(task, prompt, completions, limit=None))
    return [_scored(task, prompt, sample, answer) for sample, answer in enumerate(completions)]


def is_async(task: Task) -> bool:
    """Whether ``score`` is a coroutine function."""
    return inspect.iscoroutinefunction(task.score)


async def score_awaited(
    task: Task, prompt: Prompt, completions: abc.Sequence[Completion], *, limit: float | None
) -> Scored:
    """Return what :func:`score_group` returns. A coroutine function ``score`` scores all
    completions at once, in at most ``limit`` seconds. Any other function blocks the event loop.
    """
    if not is_async(task):
        return score_group(task, prompt, completions)
    work = [
        asyncio.ensure_future(_scored_later(task, prompt, sample, completion))
        for sample, completion in enumerate(completions)
    ]
    try:
        async with asyncio.timeout(limit):
            return await asyncio.gather(*work)
    except TimeoutError:
        where = f"prompt {prompt.prompt_id}; no answer within {limit:g} s"
        message = f"the reward of {type(task).__name__} hung; {where}"
        raise GroupLost("reward hung", message) from None
    finally:
        for future in work:
            future.cancel()


@dataclass(frozen=True, slots=True)
class LocalReward:
    """Reward of a task in this process. A coroutine function ``score`` runs on the event loop, in
    at most ``limit`` seconds for a group. Any other function runs in ``thread``.
    """

    task: Task
    limit: float
    thread: Executor

    async def score(self, prompt: Prompt, completions: abc.Sequence[Completion]) -> list[Rollout]:
        """Return the group's rollouts. Raises GroupLost as :func:`score_group` does."""
        if is_async(self.task):
            scored = await score_awaited(self.task, prompt, completions, limit=self.limit)
        else:
            work = partial(score_group, self.task, prompt, completions)
            scored = await asyncio.get_running_loop().run_in_executor(self.thread, work)
        return rollouts_of(prompt, completions, scored)


def rollouts_of(
    prompt: Prompt, completions: abc.Sequence[Completion], scored: Scored
) -> list[Rollout]:
    """Return the group's rollouts, in the order of their samples."""
    return [
        Rollout.single_turn(
            prompt,
            completion,
            sample=sample,
            text=text,
            reward=math.nan if score.reward is None else score.reward,
            metrics={"correct": float(score.correct), **score.metrics},
        )
        for sample, (completion, (text, score)) in enumerate(zip(completions, scored, strict=True))
    ]


def unscored(prompt: Prompt, completions: abc.Sequence[Completion]) -> list[Rollout]:
    """Return the group's rollouts with the reward NaN and without text."""
    return [
        Rollout.single_turn(prompt, completion, sample=sample, text="", reward=math.nan, metrics={})
        for sample, completion in enumerate(completions)
    ]


def _scored(task: Task, prompt: Prompt, sample: int, completion: Completion) -> tuple[str, Score]:
    text = ""
    try:
        text = _plain_text(task.decode(completion.tokens))
        return text, plain_score(task.score(prompt, text, completion))
    except BaseException as error:  # the user's own code, which may raise SystemExit too
        raise _lost(task, prompt, sample, text, error) from None


async def _scored_later(
    task: Task, prompt: Prompt, sample: int, completion: Completion
) -> tuple[str, Score]:
    text = ""
    try:
        text = _plain_text(task.decode(completion.tokens))
        return text, plain_score(await cast(abc.Awaitable, task.score(prompt, text, completion)))
    except BaseException as error:  # the user's own code, which may raise SystemExit too
        current = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and current and current.cancelling():
            raise
        raise _lost(task, prompt, sample, text, error) from None


def _lost(task: Task, prompt: Prompt, sample: int, text: str, error: BaseException) -> GroupLost:
    """Return the loss of a group by an error of its reward."""
    reward = f"the reward of {type(task).__name__}"
    where = f"prompt {prompt.prompt_id}, sample {sample}, completion {text!r}"
    if isinstance(error, InvalidScore):
        return GroupLost("reward was invalid", f"{reward} returned {error}; {where}", "")
    what = f"{reward} raised {error_text(error)}; {where}\n{trace_of(error)}"
    return GroupLost("reward raised", what, type_of(error))


def _plain_text(text: object) -> str:
    if not isinstance(text, str):
        raise InvalidScore(f"{shown(text)} from decode, which is not text")
    return str(text)


def plain_score(score: object) -> Score:
    """Return ``score`` with plain floats, finite in float32. Raises InvalidScore."""
    if not isinstance(score, Score):
        raise InvalidScore(f"{shown(score)}, which is not a Score")
    reward = None if score.reward is None else _plain_number("reward", score.reward)
    if not isinstance(score.correct, bool | np.bool_):
        raise InvalidScore(f"correct={shown(score.correct)}, which is not a bool")
    if not isinstance(score.metrics, dict):
        raise InvalidScore(f"metrics={shown(score.metrics)}, which is not a dict")
    for name in score.metrics:
        if not isinstance(name, str) or not name or name in RESERVED_METRICS:
            rule = f"names are text, not empty, and none of {', '.join(RESERVED_METRICS)}"
            raise InvalidScore(f"a metric named {shown(name)}; {rule}")
    metrics = {str(name): _plain_entry(name, value) for name, value in score.metrics.items()}
    return Score(reward=reward, correct=bool(score.correct), metrics=metrics)


def _plain_entry(name: str, value: object) -> Entry:
    if not isinstance(value, Value):
        return _plain_number(name, value)
    number, weight, mean = (_plain_number(name, part) for part in (value[0], *value[2:]))
    rules = get_args(Reduction)
    if value.rule not in rules or weight < 0:
        rule = f"whose rule is one of {', '.join(rules)} and whose weight is at least 0"
        raise InvalidScore(f"{name}={shown(value)}, which is not a value {rule}")
    return Value(number, value.rule, weight, mean)


def _plain_number(name: str, value: object) -> float:
    number = math.nan
    if isinstance(value, Real | np.bool_):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
    if not math.isfinite(number):
        raise InvalidScore(f"{name}={shown(value)}, which is not a finite number")
    if abs(number) > FLOAT32_MAX:
        raise InvalidScore(f"{name}={shown(value)}, which is not a finite number in float32")
    return number
