"""Checks of the prompts of the user's task, and seeds of their samples."""

import hashlib
from collections.abc import Iterator

from rl.environments.protocol import EnvironmentTask
from rl.environments.task import Task
from rl.errors import RunError, naming, shown
from rl.types import Prompt


def derive_seed(
    run_seed: int, prompt_id: int, sample: int, turn: int = 0, *, stream: str = "train"
) -> int:
    """Return the seed in [0, 2^63) of a turn of a sample of a prompt; streams share no seeds."""
    key = f"{stream}/{run_seed}/{prompt_id}/{sample}/{turn}".encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "little") >> 1


def training_prompt(task: Task, prompt_id: int) -> Prompt:
    """Return prompt ``prompt_id``.

    Raises RunError, naming task, prompt and the expected value, if it cannot be used.
    """
    call = f"{type(task).__name__}.prompt({prompt_id})"
    with naming(f"task: {call}"):
        prompt = task.prompt(prompt_id)
    _check(task, prompt, prompt_id, call)
    return prompt


def eval_prompts(task: Task, count: int) -> list[Prompt]:
    """Return at most ``count`` evaluation prompts. Raises RunError as ``training_prompt`` does."""
    call = f"{type(task).__name__}.eval_prompts({count})"
    with naming(f"task: {call}"):
        prompts = task.eval_prompts(count)
    if not isinstance(prompts, list) or len(prompts) > count:
        expected = f"a list of at most {count} prompts"
        raise RunError(f"task: {call} returned {shown(prompts)}; expected {expected}")
    for place, prompt in enumerate(prompts):
        _check(task, prompt, place, f"{call}[{place}]")
    return prompts


def _check(task: Task, prompt: object, prompt_id: int, call: str) -> None:
    if not isinstance(prompt, Prompt):
        raise RunError(f"task: {call} is {shown(prompt)}; expected a Prompt")
    for field, is_right, expected in _rules(task, prompt, prompt_id):
        if not is_right:
            value = shown(getattr(prompt, field))
            raise RunError(f"task: {call} has {field}={value}; expected {expected}")


def _rules(task: Task, prompt: Prompt, prompt_id: int) -> Iterator[tuple[str, bool, str]]:
    """Yield the name of a field, whether its value is right, and the expected value."""
    is_own = type(prompt.prompt_id) is int and prompt.prompt_id == prompt_id
    yield "prompt_id", is_own, f"{prompt_id}"
    for field in ("text", "answer", "task"):
        yield field, isinstance(getattr(prompt, field), str), "text"
    tokens = prompt.tokens
    if isinstance(task, EnvironmentTask):
        yield "tokens", tokens == [], "no tokens: the environment writes the first message"
        return
    words = task.shape.vocab_size
    is_list = isinstance(tokens, list) and set(map(type, tokens)) == {int}
    yield "tokens", is_list, "a list of token ids, at least one, each an int"
    is_known = is_list and min(tokens) >= 0 and max(tokens) < words
    yield "tokens", is_known, f"token ids of the model's vocabulary, from 0 to {words - 1}"
    limit, limited_by = task.prompt_limit()
    fits = len(tokens) <= limit
    yield "tokens", fits, f"at most {limit} tokens, not {len(tokens)}, by {limited_by}"
