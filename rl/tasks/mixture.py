"""Weighted mixture of several tasks, with a curriculum of weights."""

import inspect
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Annotated, Any, ClassVar, cast

from rl.data.order import StrideSchedule
from rl.environments.task import Score, Task
from rl.errors import ConfigError, RunError, require, require_value
from rl.model.shape import ModelConfig
from rl.types import Completion, Prompt
from rl.types.rules import at_least

HELD_OUT = 10_000  # evaluation prompts of each task that the other tasks do not train on
FAR = 10**9  # distance, in prompts, of the replacement of a prompt that another task holds out
MAX_REPLACED = 100  # replacements in a row


@dataclass(kw_only=True, slots=True)
class Stage:
    """Weights that apply from a given prompt on."""

    first_prompt_id: Annotated[int, at_least(0)]
    """Index of the stage's first prompt in the stream of the run; each step takes
    ``rollout.prompts_per_step`` of them."""

    weights: dict[str, Annotated[float, at_least(0)]]
    """Weights by task; 0 for a task that is not named."""


class Mixture(Task):
    """Prompts of several tasks, each in exact proportion to its weight. Each task scores its own.

    The task of a prompt_id and its place among that task's prompts depend on the weights alone. In
    a stage the tasks follow :class:`StrideSchedule`, and each task continues from its last prompt.
    ``Prompt.task`` names the task. ``Prompt.prompt_id`` is that of the mixture, so tasks score by
    the prompt's answer. A prompt that another task holds out (one of its first 10,000) is replaced
    by a much later one of the same task's stream, so that files may overlap.

    A curriculum::

        Mixture.Config(
            tasks={"short": CopyDigits.Config(digits=1), "long": CopyDigits.Config(digits=3)},
            weights={"short": 1.0},
            stages=[Stage(first_prompt_id=1600, weights={"short": 1.0, "long": 3.0})],
            max_prompt_tokens=16,
        )
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        tasks: dict[str, Task.Config]
        """Tasks by their names in weights and metrics. Their tokenizers must be equal."""

        weights: dict[str, Annotated[float, at_least(0)]] = field(default_factory=dict)
        """Weights by task from the first prompt on; 0 for a task that is not named. Empty for equal
        weights."""

        stages: list[Stage] = field(default_factory=list)
        """Later stages, whose weights replace the previous ones."""

        held_out_weights: dict[str, Annotated[float, at_least(0)]] = field(default_factory=dict)
        """Weights by task among the held-out prompts; 0 for a task that is not named, which is then
        not evaluated. Empty for the mean share over the stages."""

    config: Config
    can_only_score: ClassVar[bool] = True

    def __init__(self, config: Config, *, seed: int, model: ModelConfig, only_scores: bool = False):
        super().__init__(config, seed=seed, model=model)
        weights = config.weights or dict.fromkeys(config.tasks, 1.0)
        stages = [Stage(first_prompt_id=0, weights=weights), *config.stages]
        _check(config, stages)
        self.tasks: dict[str, Task] = {}
        for name, inner in config.tasks.items():
            build = inner.build_scorer if only_scores else inner.build
            try:
                self.tasks[name] = build(seed=seed, model=model)
            except ConfigError as error:
                raise ConfigError(f"task.tasks.{name}: {error}") from error
        if any(inspect.iscoroutinefunction(task.score) for task in self.tasks.values()):
            self.score = self._score_later  # type: ignore[assignment, method-assign]
        (name, first), *others = self.tasks.items()
        for other, task in others:
            message = f"task.tasks: {name} and {other} have different tokenizers; use one for all"
            require(task.stop_token_ids == first.stop_token_ids, message)
            require(task.tokenizer.get_vocab() == first.tokenizer.get_vocab(), message)
        self.set_tokenizer(first.tokenizer, first.stop_token_ids)
        self._starts = [stage.first_prompt_id for stage in stages]
        self._schedules = [StrideSchedule(stage.weights) for stage in stages]
        self._before = [Counter[str]()]  # number of prompts of each task before each stage
        for schedule, (start, end) in zip(self._schedules, pairwise(self._starts), strict=False):
            self._before.append(self._before[-1] + Counter(schedule.counts(end - start)))
        self._held_out_by: dict[bytes, set[str]] = {}
        if not only_scores and len(self.tasks) > 1:
            for name, task in self.tasks.items():
                for prompt in task.eval_prompts(HELD_OUT):
                    self._held_out_by.setdefault(_key(prompt), set()).add(name)

    def prompt(self, prompt_id: int) -> Prompt:
        stage = bisect_right(self._starts, prompt_id) - 1
        name, place = self._schedules[stage].at(prompt_id - self._starts[stage])
        place += self._before[stage][name]
        for jump in range(MAX_REPLACED):
            prompt = self.tasks[name].prompt(place + jump * FAR)
            others = self._held_out_by.get(_key(prompt), set()) - {name}
            if not others:
                return _named(name, prompt, prompt_id)
        raise RunError(
            f"task.tasks: {' and '.join(sorted(others))} holds out for evaluation what {name} "
            f"would train on: {MAX_REPLACED} prompts in a row, the last {prompt.text!r}; give "
            "them data that overlaps less"
        )

    def eval_prompts(self, count: int) -> list[Prompt]:
        """Return prompts of each task in proportion to its share, with more of the others if a task
        has too few.
        """
        due = [
            ((place + 0.5) / share, name, prompt)
            for name, share in self._held_out_shares().items()
            for place, prompt in enumerate(self.tasks[name].eval_prompts(count))
        ]
        due.sort(key=lambda entry: entry[0])
        first = enumerate(due[:count])
        return [_named(name, prompt, prompt_id) for prompt_id, (_, name, prompt) in first]

    def score(self, prompt: Prompt, text: str, completion: Completion) -> Score:
        name, _, inner = prompt.task.partition("/")
        return self.tasks[name].score(replace(prompt, task=inner), text, completion)

    def describe(self, folder: Path) -> None:
        next(iter(self.tasks.values())).describe(folder)

    async def _score_later(self, prompt: Prompt, text: str, completion: Completion) -> Score:
        score: Any = Mixture.score(self, prompt, text, completion)
        return cast(Score, await score if inspect.isawaitable(score) else score)

    def _held_out_shares(self) -> dict[str, float]:
        """Return the share of each task that is evaluated among the held-out prompts."""
        weights = self.config.held_out_weights
        schedules = [StrideSchedule(weights)] if weights else self._schedules
        shares = Counter[str]()
        for schedule in schedules:
            shares.update(schedule.shares)
        count = len(schedules)
        return {name: float(shares[name] / count) for name in self.tasks if shares[name]}


def _key(prompt: Prompt) -> bytes:
    """Return a digest of the text and tokens of a prompt."""
    return blake2b(repr((prompt.text, prompt.tokens)).encode(), digest_size=16).digest()


def _named(name: str, prompt: Prompt, prompt_id: int) -> Prompt:
    task = f"{name}/{prompt.task}" if prompt.task else name
    return replace(prompt, prompt_id=prompt_id, task=task)


def _check(config: Mixture.Config, stages: list[Stage]) -> None:
    """Raise ConfigError, naming field, value and what is allowed."""
    require(bool(config.tasks), "task.tasks is empty; name at least one task")
    longest = config.max_prompt_tokens
    for name, inner in config.tasks.items():
        require(
            name.isidentifier(),
            f"task.tasks has the name {name!r}; it must be letters, digits and underscores",
        )
        length = inner.max_prompt_tokens
        rule = f"at most task.max_prompt_tokens={longest}"
        require_value(length <= longest, f"task.tasks.{name}.max_prompt_tokens", length, rule)
    _check_weights("task.weights", stages[0].weights, config.tasks)
    if config.held_out_weights:
        _check_weights("task.held_out_weights", config.held_out_weights, config.tasks)
    for place, (before, stage) in enumerate(pairwise(stages)):
        stage_field = f"task.stages.{place}"
        first = stage.first_prompt_id
        rule = f"above {before.first_prompt_id}, the first of the stage before"
        require_value(first > before.first_prompt_id, f"{stage_field}.first_prompt_id", first, rule)
        _check_weights(f"{stage_field}.weights", stage.weights, config.tasks)


def _check_weights(
    field_name: str, weights: Mapping[str, float], tasks: Mapping[str, Task.Config]
) -> None:
    for name, weight in weights.items():
        require(name in tasks, f"{field_name} names {name!r}; the tasks are {', '.join(tasks)}")
        require_value(0 <= weight < inf, f"{field_name}.{name}", weight, "0 or above, and finite")
    require(any(weights.values()), f"{field_name} is {weights}; at least one must be above 0")
