"""Trial of the user's code before any process starts."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from rl.algorithms.algorithm import Algorithm
from rl.config import RLConfig
from rl.errors import ConfigError, GroupLost, RunError, require
from rl.frames import users_code
from rl.rollout.prompts import training_prompt
from rl.rollout.scoring import score_group
from rl.tasks.base import Task, showing_progress
from rl.tasks.environment import EnvironmentTask
from rl.trainers.evaluation import held_out_prompts
from rl.types import Completion

LINE_EVERY_S = 5.0
MAX_TRIED = 1000  # number of prompts, and of groups of completions


def build_task(config: RLConfig) -> Task:
    """Build the task of a run and look at its first prompts, with progress on the console if that
    takes long.

    Raises ConfigError, also for what the task's own code raises.
    """
    name = type(config.task).__qualname__.removesuffix(".Config")
    with reading(quiet=config.quiet), _before_start():
        with users_code(f"task: building {name}"):
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
        for prompt_id in range(min(config.rollout.prompts_per_step, MAX_TRIED)):
            training_prompt(task, prompt_id)
    return task


def try_reward(task: Task, *, deadline: float) -> None:
    """Score the reference answer of the first prompt, within ``deadline`` seconds. An environment
    is not tried.

    Raises ConfigError if the reward raises, hangs or returns no valid score.
    """
    if isinstance(task, EnvironmentTask):
        return
    prompt = training_prompt(task, 0)
    tokens = task.tokenizer.encode(prompt.answer, add_special_tokens=False)
    answer = Completion.written([*tokens, task.stop_token_ids[0]])
    lost = [GroupLost("", f"the reward of {type(task).__name__} did not end in {deadline:g} s")]

    def score() -> None:
        try:
            score_group(task, prompt, [answer])
            lost.clear()
        except GroupLost as error:
            lost[:] = [error]

    thread = threading.Thread(target=score, daemon=True)
    thread.start()
    thread.join(deadline)
    if lost:
        text = f"task: {lost[0]}\nthis was the reference answer of the first prompt; correct score"
        raise ConfigError(text)


def check_algorithm(config: RLConfig) -> None:
    """Call advantage and corrections on made-up completions.

    Raises ConfigError if one does not keep its contract.
    """
    rollout = config.rollout
    groups = min(math.ceil(rollout.prompts_per_step / rollout.stream_chunks), MAX_TRIED)
    with users_code("algorithm"):
        algorithm: Algorithm = config.algorithm.build(run=config)
    with _before_start():
        algorithm.rehearse(groups, rollout.samples_per_prompt)


@contextmanager
def reading(*, quiet: bool) -> Iterator[None]:
    """Show the progress of reading on the console while the block runs, if it takes long."""
    with _showing(Console(quiet=quiet, highlight=False)) as show, showing_progress(show):
        yield


@contextmanager
def _before_start() -> Iterator[None]:
    """Raise RunError as ConfigError, since no run has begun. Ctrl-C stays KeyboardInterrupt."""
    try:
        yield
    except RunError as error:
        if isinstance(error.__cause__, ConfigError | KeyboardInterrupt):
            raise error.__cause__ from None
        raise ConfigError(str(error)) from error


@contextmanager
def _showing(console: Console) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows text: in one changing line on a terminal, otherwise in a line
    every few seconds.
    """
    if console.is_terminal and not console.quiet:
        with console.status("reading the data") as status:
            yield status.update
        return
    shown = time.monotonic()

    def show(text: str) -> None:
        nonlocal shown
        if time.monotonic() - shown >= LINE_EVERY_S:
            shown = time.monotonic()
            console.print(text, soft_wrap=True)

    yield show
