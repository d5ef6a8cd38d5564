"""What a task says of one prompt's completions, or why that is of no use."""

import math
import traceback
from collections.abc import Sequence
from numbers import Real

from rl.errors import GroupLost
from rl.tasks.base import Score, Task
from rl.types import Completion, Prompt, Rollout


def score_group(task: Task, prompt: Prompt, completions: Sequence[Completion]) -> list[tuple[str, Score]]:
    """Text and score of each completion.

    Raises GroupLost, naming the completion, where the task's ``score`` raises, or where what it returns is no Score or
    holds anything but finite numbers.
    """
    return [_scored(task, prompt, sample, completion) for sample, completion in enumerate(completions)]


def rollouts_of(
    prompt: Prompt, completions: Sequence[Completion], scored: Sequence[tuple[str, Score]]
) -> list[Rollout]:
    """The group's rollouts, in the order of their samples."""
    return [
        Rollout(
            prompt=prompt,
            sample=sample,
            completion=completion,
            text=text,
            reward=score.reward,
            metrics={"exact": float(score.exact), **score.metrics},
        )
        for sample, (completion, (text, score)) in enumerate(zip(completions, scored, strict=True))
    ]


def _scored(task: Task, prompt: Prompt, sample: int, completion: Completion) -> tuple[str, Score]:
    text = task.decode(completion.tokens)
    whose, where = f"the reward of {type(task).__name__}", f"prompt {prompt.ordinal}, sample {sample}"
    try:
        score = task.score(prompt, text, completion)
    except Exception as error:  # the user's own code
        raised = f"{whose} raised {type(error).__name__}: {error}; {where}, completion {text!r}"
        raise GroupLost("reward raised", f"{raised}\n{traceback.format_exc()}") from error
    if wrong := _nonsense(score):
        raise GroupLost("reward made no sense", f"{whose} returned {wrong}; {where}, completion {text!r}")
    return text, score


def _nonsense(score: object) -> str:
    """What is wrong with it, if anything."""
    if not isinstance(score, Score):
        return f"{score!r}, which is no Score"
    values = {"reward": score.reward, **score.metrics}
    wrong = [f"{name}={value!r}" for name, value in values.items() if not _is_finite(value)]
    return f"{', '.join(wrong)}, which is no finite number" if wrong else ""


def _is_finite(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)
