"""Parts of a sampled answer, told apart by control tokens."""

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rl.dialects.dialect import AssistantTurn, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

THOUGHT = r"(?:<(?:\w+:)?think(?:ing)?>|\[THINK\])"
THOUGHT_BEGIN = re.compile(rf"\s*{THOUGHT}")
THOUGHT_OPEN = re.compile(rf"{THOUGHT}\s*$")
THOUGHT_END = re.compile(r"</(?:\w+:)?think(?:ing)?>|\[/THINK\]")


class Markup(NamedTuple):
    """Control tokens between the parts of an answer; -1 for one that a format lacks."""

    stops: tuple[int, ...]
    think: int = -1
    think_end: int = -1
    tool_call: int = -1
    tool_call_end: int = -1
    """If a format lacks it, calls end with the answer, and may be in a list."""
    arguments: str = "arguments"
    """Key of the arguments of a call."""
    is_bare: bool = False
    """Whether an answer that is a call needs no control token."""


def parse_answer(
    tokens: Sequence[int], markup: Markup, tokenizer: "PreTrainedTokenizerFast"
) -> AssistantTurn:
    """Return the parts of a sampled answer.

    Thinking is what follows ``<think>`` at the start, up to ``</think>`` or to a tool call. Content
    is the text before the first call.
    """
    body = [token for token in tokens if token not in markup.stops]
    begin = next((i for i, token in enumerate(body) if tokenizer.decode([token]).strip()), None)
    reasoning = ""
    is_open = False
    rest = body
    if begin is not None and body[begin] == markup.think:
        close = _index(body, markup.think_end, begin)
        call = _index(body, markup.tool_call, begin)  # a call ends the thinking too
        end = close if close < len(body) else call
        is_open = end == len(body)
        reasoning = tokenizer.decode(body[begin + 1 : end])
        rest = body[end + (end == close) :]
    calls = []
    first = place = _index(rest, markup.tool_call, 0)
    while place < len(rest):
        end = _index(rest, markup.tool_call_end, place)
        text = tokenizer.decode(rest[place + 1 : end])
        has_end = markup.tool_call_end < 0 or end < len(rest)
        calls += _parse_calls(text, markup) if has_end else [_broken("the tool call has no end")]
        place = _index(rest, markup.tool_call, end)
    content = tokenizer.decode(rest[:first]).strip()
    if markup.is_bare and not calls and not (bare := _parse_calls(content, markup))[0].error:
        calls, content = bare, ""
    return AssistantTurn(
        content=content,
        reasoning=reasoning.strip(),
        tool_calls=tuple(calls),
        is_reasoning_open=is_open,
    )


def _index(tokens: Sequence[int], token: int, start: int) -> int:
    """Return the first place of ``token`` from ``start`` on, or the length of ``tokens``."""
    return next((i for i in range(start, len(tokens)) if tokens[i] == token), len(tokens))


def _parse_calls(text: str, markup: Markup) -> list[ToolCall]:
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        return [_broken(f"the tool call is not JSON: {error}")]
    is_list = isinstance(value, list) and bool(value) and markup.tool_call_end < 0
    return [_call(each, markup.arguments) for each in (value if is_list else [value])]


def _call(call: Any, key: str) -> ToolCall:
    name = call.get("name") if isinstance(call, dict) else None
    arguments = call.get(key, {}) if isinstance(call, dict) else None
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return _broken(f'a tool call is {{"name": …, "{key}": {{…}}}}')
    return ToolCall(name=name, arguments=arguments, id=str(call.get("id") or ""))


def _broken(error: str) -> ToolCall:
    return ToolCall(name="", arguments={}, error=error)


def without_thoughts(text: str, prompt: Any = None) -> str:
    """Return what a completion says after its thoughts, without white space before it; "" if a
    thought never ends. The chat template may have opened the thought in ``prompt``.
    """
    *thoughts, answer = THOUGHT_END.split(text)
    is_open = not thoughts and THOUGHT_OPEN.search(getattr(prompt, "text", "")[-40:])
    return "" if is_open or THOUGHT_BEGIN.match(answer) else answer.lstrip()
