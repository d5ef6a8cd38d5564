"""Parts of a sampled answer, told apart by control tokens."""

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rl.dialects.dialect import AssistantTurn, Markup, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

THOUGHT = r"(?:<(?:\w+:)?think(?:ing)?>|\[THINK\])"
THOUGHT_BEGIN = re.compile(rf"\s*{THOUGHT}")
THOUGHT_OPEN = re.compile(rf"{THOUGHT}\s*$")
THOUGHT_END = re.compile(r"</(?:\w+:)?think(?:ing)?>|\[/THINK\]")
BYTE = re.compile("<0x[0-9A-F]{2}>")
"""Token of one byte, in tokenizers whose words are characters."""
REPLACEMENT = "\ufffd"
"""Character that stands for bytes that are not text."""


def parse_answer(
    tokens: Sequence[int], markup: Markup, tokenizer: "PreTrainedTokenizerFast"
) -> AssistantTurn:
    """Return the parts of a sampled answer.

    Thinking is what follows ``<think>`` at the start, up to ``</think>`` or to a tool call. Content
    is the text before the first call.
    """
    parts = AnswerParts(markup, tokenizer)
    for token in tokens:
        parts.read(token)
    calls = []
    rest = parts.calls
    place = 0
    while place < len(rest):
        end = _index(rest, markup.tool_call_end, place)
        text = tokenizer.decode(rest[place + 1 : end])
        has_end = markup.tool_call_end < 0 or end < len(rest)
        calls += _parse_calls(text, markup) if has_end else [_broken("the tool call has no end")]
        place = _index(rest, markup.tool_call, end)
    content = tokenizer.decode(parts.content).strip()
    if markup.is_bare and not calls and not (bare := _parse_calls(content, markup))[0].error:
        calls, content = bare, ""
    return AssistantTurn(
        content=content,
        reasoning=tokenizer.decode(parts.thought).strip(),
        tool_calls=tuple(calls),
        is_reasoning_open=parts.is_thinking and not parts.calls,
    )


class AnswerParts:
    """Tokens of an answer by its parts, which are read one by one, without white space before the
    first part.
    """

    def __init__(self, markup: Markup, tokenizer: "PreTrainedTokenizerFast"):
        self.thought: list[int] = []
        self.content: list[int] = []
        self.calls: list[int] = []
        """All from the first call on. A thought that ends after them has them too."""
        self.is_thinking = False
        self._markup = markup
        self._decode = tokenizer.decode
        self._has_begun = False

    def read(self, token: int) -> list[int] | None:
        """Return the part that has the next token; None if it is between parts."""
        markup = self._markup
        is_first = not self._has_begun
        if token in markup.stops or (is_first and not self._decode([token]).strip()):
            return None
        self._has_begun = True
        if is_first and token == markup.think:
            self.is_thinking = True
            return None
        if self.is_thinking and token == markup.think_end:
            self.is_thinking = False
            self.thought += self.calls
            self.calls = []
            return None
        text = self.thought if self.is_thinking else self.content
        part = self.calls if self.calls or token == markup.tool_call else text
        part.append(token)
        return part


class TextReader:
    """Text of tokens that are read one by one, as far as no later token changes it."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast"):
        self.text = ""
        self.end = 0
        """Length of the text up to the last whole character."""
        self._backend = tokenizer.backend_tokenizer
        self._tokens: list[int] = []
        self._known = 0  # number of these tokens that are in the text
        self._begin = ""  # their text

    def read(self, token: int) -> None:
        """Add the next token. Bytes wait for the whole character."""
        self._tokens.append(token)
        text = self._backend.decode(self._tokens, skip_special_tokens=False)
        new = text[len(self._begin) :]
        self.end = len(self.text) + len(new.rstrip(REPLACEMENT))
        # a byte that is not text may change the characters of the bytes before it
        if text.endswith(REPLACEMENT) or BYTE.fullmatch(self._backend.id_to_token(token) or ""):
            return
        self.text += new
        self._tokens = self._tokens[self._known :]  # a word may be written otherwise at the begin
        self._known = len(self._tokens)
        self._begin = self._backend.decode(self._tokens, skip_special_tokens=False)


def _index(tokens: Sequence[int], token: int, start: int) -> int:
    """Return the first place of ``token`` from ``start`` on, or the length of ``tokens``."""
    return next((i for i in range(start, len(tokens)) if tokens[i] == token), len(tokens))


def _parse_calls(text: str, markup: Markup) -> list[ToolCall]:
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        return [_broken(f"the tool call is not JSON: {error}")]
    is_list = isinstance(value, list) and bool(value) and markup.tool_call_end < 0
    return [_call(call, markup.arguments) for call in (value if is_list else [value])]


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
