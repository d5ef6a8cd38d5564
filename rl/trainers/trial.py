"""Trial of the user's code before any process starts."""

import asyncio
import math
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.console import Console

from rl.config import RLConfig
from rl.config.users_code import users_code
from rl.data.jsonl import showing_progress, tell_progress
from rl.data.sources import is_quiet
from rl.environments.protocol import EnvironmentTask
from rl.environments.task import Task
from rl.errors import ConfigError, GroupLost, RunError, printable, require, shown
from rl.host.threads import in_thread
from rl.rollout.episodes import played
from rl.rollout.prompts import training_prompt
from rl.rollout.scoring import score_group
from rl.trainers.algorithm import Algorithm
from rl.trainers.evaluation import held_out_prompts
from rl.types import Completion, Prompt

LINE_EVERY_S = 5.0
MAX_TRIED = 1000  # number of prompts, and of groups of completions
MAX_TURNS = 4  # number of answers in the episode that is played
MAX_EPISODES = 3  # number of prompts whose episodes are played until one is not lost
END_S = 5.0  # for an agent and its gateway to end
MADE_UP = "I do not know."
"""Answer to a prompt that has no reference answer."""


def build_task(config: RLConfig) -> Task:
    """Build the task of a run and look at its held-out prompts, with progress on the console if
    that takes long.

    Raises ConfigError, also for what the task's own code raises.
    """
    name = type(config.task).__qualname__.removesuffix(".Config")
    with reading(quiet=config.quiet), _before_start("task"):
        with users_code(f"task: building {name}", field="task"):
            task: Task = config.task.build(seed=config.seed, model=config.model)
        for attribute, call in (
            ("shape", "super().__init__(config, seed=seed, model=model)"),
            ("stop_token_ids", "self.set_tokenizer(tokenizer, stop_token_ids)"),
        ):
            require(
                hasattr(task, attribute),
                f"task: {name} has no {attribute}; its constructor must call {call}",
            )
        held_out_prompts(config.evaluation, task)
    return task


def try_task(config: RLConfig, task: Task, *, trains: bool = True) -> None:
    """Look at the prompts of the first step and score the reference answer of the first one; unless
    ``trains``, these are held-out prompts. If the task has environments, play an episode of at most
    ``MAX_TURNS`` answers instead. If the episode is lost, try some more prompts, since a run
    survives a prompt that fails.

    Random states of this process stay as they are. Raises ConfigError if the user's code raises,
    hangs or returns what a run could not use.
    """
    plays = isinstance(task, EnvironmentTask)
    count = max(min(config.rollout.prompts_per_step, MAX_TRIED), MAX_EPISODES * plays)
    with _same_randomness(), reading(quiet=config.quiet), _before_start("task"):
        if trains:
            prompts = [training_prompt(task, prompt_id) for prompt_id in range(count)]
        else:
            prompts = held_out_prompts(config.evaluation, task)[:count]
        if prompts and isinstance(task, EnvironmentTask):
            _try_episodes(task, prompts, config.rollout.max_tokens)
        elif prompts:
            answer = _written(task, prompts[0].answer)
            what = f"the reward of {type(task).__name__}"
            score = partial(score_group, task, prompts[0], [answer])
            if lost := _lost(score, what, config.deadlines.reward):
                advice = "this was the reference answer of the first prompt; correct score"
                raise ConfigError(f"task: {lost}\n{advice}")


def _try_episodes(task: EnvironmentTask, prompts: list[Prompt], max_tokens: int) -> None:
    what = f"an episode of {type(task).__name__}"
    calls = MAX_TURNS + 3  # environment, reset and close too; a coroutine may block all of them
    deadline = calls * task.config.step_s + END_S
    reasons = list[str]()
    for prompt in prompts[:MAX_EPISODES]:
        text = prompt.answer or MADE_UP
        episode = played(task, prompt, _written(task, text, max_tokens), turns=MAX_TURNS)
        lost = _lost(partial(asyncio.run, episode), what, deadline)
        if lost is None:
            return
        reasons.append(f"{lost}\nthis was an episode with the answer {shown(text)}")
        if not lost.reason:  # its thread goes on
            break
    advice = "correct the environment or the model's template, or start what it needs"
    raise ConfigError(f"task: {reasons[0]}; {advice}")


def _written(task: Task, text: str, max_tokens: int | None = None) -> Completion:
    """Return ``text`` as a completion of one to ``max_tokens`` tokens. It ends in a stop token if
    the task has any.
    """
    tokens = task.tokenizer.encode(text, add_special_tokens=False)
    most = len(tokens) if max_tokens is None else max_tokens - 1
    return Completion.written([*tokens[:most], *task.stop_token_ids[:1]] or [0])


def _lost(work: Callable[[], Any], what: str, deadline: float) -> GroupLost | None:
    """Run ``work`` in a thread of its own; return the GroupLost that it raises, or one without a
    reason if it does not end within ``deadline`` seconds.
    """
    future = in_thread(work)
    for second in range(math.ceil(deadline)):
        if wait([future], timeout=1.0).done:
            break
        tell_progress(f"trying {what}: {second + 1} s")
    if not future.done():
        return GroupLost("", f"{what} did not end in {deadline:g} s")
    try:
        future.result()
    except GroupLost as lost:
        return lost
    return None


def build_algorithm(config: RLConfig) -> Algorithm:
    """Return the algorithm of a run. Another one is called on made-up completions before, since its
    parts may have states.

    Raises ConfigError if a part does not keep its contract.
    """
    rollout = config.rollout
    groups = min(math.ceil(rollout.prompts_per_step / rollout.stream_chunks), MAX_TRIED)
    with users_code("algorithm"):
        trial: Algorithm = config.algorithm.build(run=config)
        algorithm: Algorithm = config.algorithm.build(run=config)
    with _before_start():
        trial.rehearse(groups, rollout.samples_per_prompt)
    return algorithm


@contextmanager
def _same_randomness() -> Iterator[None]:
    """Restore the random states of this process after the block."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


@contextmanager
def reading(*, quiet: bool) -> Iterator[None]:
    """Show the progress of reading while the block runs, if it takes long: in a line every few
    seconds, between the bars of downloads.
    """
    console = Console(quiet=quiet, highlight=False)
    is_quiet.set(quiet)
    newest = time.monotonic()

    def show(text: str) -> None:
        nonlocal newest
        if time.monotonic() - newest >= LINE_EVERY_S:
            newest = time.monotonic()
            console.print(printable(text), soft_wrap=True)

    with showing_progress(show):
        yield


@contextmanager
def _before_start(field: str = "") -> Iterator[None]:
    """Raise RunError as ConfigError of ``field``, since no run has begun. Ctrl-C stays
    KeyboardInterrupt.
    """
    try:
        yield
    except RunError as error:
        if isinstance(error.__cause__, ConfigError | KeyboardInterrupt):
            raise error.__cause__ from None
        raise ConfigError(str(error), field=field) from error
