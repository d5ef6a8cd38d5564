"""Prompts of the user's task, checked before a generator sees them."""

from collections.abc import Iterator

from rl.errors import RunError, naming, shown
from rl.tasks.base import Task
from rl.types import Prompt


def training_prompt(task: Task, ordinal: int) -> Prompt:
    """Prompt ``ordinal``.

    Raises RunError that names task, prompt and what was expected if it cannot be used.
    """
    call = f"{type(task).__name__}.prompt({ordinal})"
    with naming(f"data: {call}"):
        prompt = task.prompt(ordinal)
    _check(task, prompt, ordinal, call)
    return prompt


def eval_prompts(task: Task, count: int) -> list[Prompt]:
    """At most ``count`` prompts for evaluation. Raises RunError, as ``training_prompt`` does."""
    call = f"{type(task).__name__}.eval_prompts({count})"
    with naming(f"data: {call}"):
        prompts = task.eval_prompts(count)
    if not isinstance(prompts, list) or len(prompts) > count:
        raise RunError(
            f"data: {call} returned {shown(prompts)}; expected is a list of at most {count} prompts"
        )
    for place, prompt in enumerate(prompts):
        _check(task, prompt, place, f"{call}[{place}]")
    return prompts


def _check(task: Task, prompt: object, ordinal: int, call: str) -> None:
    if not isinstance(prompt, Prompt):
        raise RunError(f"data: {call} is {shown(prompt)}; expected is a Prompt")
    for field, is_right, expected in _rules(task, prompt, ordinal):
        if not is_right:
            raise RunError(
                f"data: {call} has {field}={shown(getattr(prompt, field))}; expected is {expected}"
            )


def _rules(task: Task, prompt: Prompt, ordinal: int) -> Iterator[tuple[str, bool, str]]:
    """Name of a field, whether its value is right, and what is expected."""
    yield "ordinal", type(prompt.ordinal) is int and prompt.ordinal == ordinal, f"{ordinal}"
    tokens = prompt.tokens
    words = task.shape.vocab_size
    is_list = isinstance(tokens, list) and set(map(type, tokens)) == {int}
    yield "tokens", is_list, "a list of token ids, at least one, each an int"
    is_known = is_list and min(tokens) >= 0 and max(tokens) < words
    yield "tokens", is_known, f"token ids of the model's vocabulary, from 0 to {words - 1}"
    limit, limited_by = task.prompt_limit()
    yield (
        "tokens",
        len(tokens) <= limit,
        f"at most {limit} tokens, not {len(tokens)}, by {limited_by}",
    )
    for field in ("text", "answer", "task"):
        yield field, isinstance(getattr(prompt, field), str), "text"
