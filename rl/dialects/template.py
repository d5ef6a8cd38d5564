"""Comparison of rendered tokens with a tokenizer's own chat template, on sample conversations."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from rl.dialects.dialect import ConversationError
from rl.dialects.plain_text import ControlTokens
from rl.errors import error_text, shown
from rl.model.tokenizer import read_stop_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DATE = datetime(2024, 7, 26)
"""Date that chat templates write as today's, so that a prompt is the same on each day."""
SHOWN = 40  # characters of a difference


def template_text(
    tokenizer: "PreTrainedTokenizerFast",
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    **options: Any,
) -> str:
    """Return the text that the chat template makes of a conversation.

    Raises ConversationError if the template, which is a program, fails.
    """
    variables: dict[str, Any] = {"tools": tools, "strftime_now": DATE.strftime, **options}
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **variables))
    except Exception as error:
        line = f" in line {error.lineno}" if hasattr(error, "lineno") else ""
        raise ConversationError(f"the chat template fails: {error_text(error)}{line}") from None


def template_stops(tokenizer: "PreTrainedTokenizerFast") -> list[int]:
    """Return the token that the chat template writes after an answer, if it writes one."""
    answer = ANSWERED[-1]
    try:
        text = template_text(tokenizer, [*QUESTION, answer, *QUESTION], None)
    except ConversationError:
        return []
    _, content, rest = text.rpartition(answer["content"])
    space, *parts = ControlTokens(tokenizer).split(rest)
    is_next = content and parts and not space.strip()
    return [tokenizer.get_added_vocab()[parts[0]]] if is_next else []


def stop_tokens(tokenizer: "PreTrainedTokenizerFast") -> tuple[int, ...]:
    """Return the tokens that stop an answer: that of the chat template, then the eos tokens."""
    stops = template_stops(tokenizer) if tokenizer.chat_template else []
    return tuple(dict.fromkeys([*stops, *read_stop_token_ids(tokenizer)]))


def difference(tokenizer: "PreTrainedTokenizerFast", tokens: np.ndarray, text: str) -> str:
    """Return in words how ``tokens`` differ from the template's ``text``; empty if they do not."""
    if tokenizer.encode(text, add_special_tokens=False) == tokens.tolist():
        return ""
    return text_difference(str(tokenizer.decode(tokens.tolist())), text)


def text_difference(ours: str, text: str) -> str:
    """Return in words how the template's ``text`` differs from ``ours``; empty if it does not."""
    if ours == text:
        return ""
    pairs = enumerate(zip(ours, text, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(text)))
    start = max(0, place - SHOWN // 2)
    theirs = shown(text[start : place + SHOWN // 2])
    return f"it has {theirs} instead of {shown(ours[start : place + SHOWN // 2])}"


TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks up a <word>: 'né'",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    """Return a message."""
    return {"role": role, "content": content, **more}


def call(**arguments: Any) -> dict[str, Any]:
    """Return a tool call."""
    function = {"name": "look_up", "arguments": arguments}
    return {"id": "call0", "type": "function", "function": function}


QUESTION = [said("user", "What is  né?")]
SYSTEM = [said("system", "Be brief.\n"), *QUESTION]
ANSWERED = [*SYSTEM, said("assistant", "It is:\n\n1.")]
THOUGHT = [*SYSTEM, said("assistant", "Born.", reasoning_content="Let me\nthink.")]
SEVERAL = [*THOUGHT, said("user", "Sure?"), said("assistant", "Yes.", reasoning_content="Hm.")]
CALLED = [*QUESTION, said("assistant", "", tool_calls=[call(word="né")]), said("tool", '{"a": 1}')]
CALLS = [
    *SYSTEM,
    said("assistant", "I look.", tool_calls=[call(word="né"), call(word="b")]),
    said("tool", "one"),
    said("tool", "two"),
    said("assistant", "Both."),
]

Probe = tuple[list[dict[str, Any]], list[dict[str, Any]] | None]
PROBES: list[Probe] = [
    (QUESTION, None),
    (SYSTEM, None),
    (ANSWERED, None),
    (THOUGHT, None),
    (SEVERAL, None),
    (QUESTION, [TOOL]),
    (SYSTEM, [TOOL, TOOL]),
    (CALLED, [TOOL]),
    (CALLS, [TOOL]),
    (CALLS, None),
]
