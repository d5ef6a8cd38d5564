"""Comparison of rendered tokens with a tokenizer's own chat template."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rl.dialects.base import ConversationError
from rl.errors import said_by, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SHOWN = 40  # characters of a difference


def template_text(
    tokenizer: "PreTrainedTokenizerFast",
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    **options: bool,
) -> str:
    """Return the text that the chat template makes of a conversation.

    Raises ConversationError if the template, which is a program, fails.
    """
    try:
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **options)
    except Exception as error:
        raise ConversationError(f"the chat template fails: {said_by(error)}") from None
    return str(text)


def difference(tokenizer: "PreTrainedTokenizerFast", tokens: np.ndarray, text: str) -> str:
    """Return in words how ``tokens`` differ from the template's ``text``; empty if they do not."""
    if tokenizer.encode(text, add_special_tokens=False) == tokens.tolist():
        return ""
    ours = str(tokenizer.decode(tokens.tolist()))
    if ours == text:
        return ""
    pairs = enumerate(zip(ours, text, strict=False))
    place = next((i for i, (a, b) in pairs if a != b), min(len(ours), len(text)))
    start = max(0, place - SHOWN // 2)
    theirs = shown(text[start : place + SHOWN // 2])
    return f"it has {theirs} instead of {shown(ours[start : place + SHOWN // 2])}"
