"""Plain text without a chat template, as base models take it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rl.dialects.base import AssistantTurn, ConversationError, Dialect, Rendered
from rl.dialects.plain_text import ControlTokens
from rl.errors import require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class TextDialect(Dialect):
    """Dialect that encodes plain text and renders no conversation.

    ``reason`` is the error that messages get. Raises ConfigError if ``tokenizer`` has no eos_token,
    without which no text could end.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", reason: str):
        stop = tokenizer.eos_token_id
        place = repr(tokenizer.name_or_path)
        require(stop is not None, f"model.hf_path: the tokenizer in {place} has no eos_token")
        self.tokenizer = tokenizer
        self.stop_token_ids: tuple[int, ...] = (stop,)
        self._reason = reason
        self._control = ControlTokens(tokenizer)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        enable_thinking: bool = True,
    ) -> Rendered:
        """Raise ConversationError."""
        raise ConversationError(self._reason)

    def parse(self, prompt: Sequence[int], answer: Sequence[int]) -> AssistantTurn:
        """Return the text of ``answer``."""
        text = self.tokenizer.decode([each for each in answer if each not in self.stop_token_ids])
        return AssistantTurn(content=text)

    def continuation(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        messages: Sequence[Mapping[str, Any]],
        *,
        enable_thinking: bool = True,
    ) -> list[int]:
        """Raise ConversationError."""
        raise ConversationError(self._reason)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of ``text``. Raises ConversationError if it has a control token."""
        self._control.refuse_in(text, "text")
        return list(self.tokenizer.encode(text, add_special_tokens=False))
