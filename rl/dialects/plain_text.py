"""Encoding of outside text without control tokens, and a dialect for plain text alone."""

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from rl.dialects.dialect import AssistantTurn, ConversationError, Dialect, Rendered, Tokens
from rl.errors import ConfigError, require
from rl.model.tokenizer import read_stop_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class PlainText:
    """Encoder of outside text: a copy of ``tokenizer`` that encodes control tokens as plain text.

    ``within`` is for texts that stand after a control token: some tokenizers begin a whole text
    with a space of their own, and such a part without.

    Raises ConfigError if the copy still makes one of them. This happens if the vocabulary lists
    them among its words.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", *, within: bool = False):
        from tokenizers import Tokenizer

        spec = json.loads(tokenizer.backend_tokenizer.to_str())
        spec |= {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
        text = json.dumps(spec)
        if within:
            text = text.replace('"prepend_scheme": "first"', '"prepend_scheme": "never"')
        self._copy = Tokenizer.from_str(text)
        control = tokenizer.get_added_vocab()
        for text, row in zip(control, self.encode(list(control)), strict=True):
            if not set(control.values()).isdisjoint(row):
                problem = (
                    f"the tokenizer in {tokenizer.name_or_path!r} makes a control token of the "
                    f"plain text {text!r}"
                )
                fix = "remove it from the vocabulary's words"
                raise ConfigError(problem, field="model.hf_path", fix=fix)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text."""
        rows = self._copy.encode_batch_fast(list(texts), add_special_tokens=False)
        return [row.ids for row in rows]


class ControlTokens:
    """The control tokens of ``tokenizer`` as they are written in text."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast"):
        added = filter(str.strip, tokenizer.get_added_vocab())  # runs of spaces control nothing
        words = sorted(added, key=len, reverse=True)
        self._pattern = re.compile(f"({'|'.join(map(re.escape, words)) or '(?!)'})")

    def split(self, text: str) -> list[str]:
        """Return the texts and the control tokens between them, by turns; a text is first."""
        return self._pattern.split(text)

    def first_in(self, text: str) -> str | None:
        """Return the first control token that ``text`` contains, or None."""
        match = self._pattern.search(text)
        return match.group() if match else None

    def refuse_in(self, text: str, where: str) -> None:
        """Raise ConversationError, naming ``where``, if ``tokenizer`` cannot encode ``text`` as
        plain text.
        """
        if not is_unicode(text):
            raise ConversationError(f"{where}: half of a surrogate pair, as \\ud800; remove it")
        if word := self.first_in(text):
            raise ConversationError(
                f"{where}: its text contains the control token {word!r}, which cannot be encoded "
                "as text for this model; remove it, or write thinking as reasoning_content"
            )


class Pieces:
    """Control tokens and texts in order, each with its message and whether it is sampled."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int | str, int, bool]] = []

    def add(self, message: int, sampled: bool, *pieces: int | str) -> None:
        """Append control tokens (int) and texts; neighbouring texts of one origin become one."""
        for piece in pieces:
            before = self._pieces[-1] if self._pieces else (0, -1, False)
            if isinstance(piece, str) and (str, message, sampled) == (type(before[0]), *before[1:]):
                self._pieces[-1] = (f"{before[0]}{piece}", message, sampled)
            elif piece != "":
                self._pieces.append((piece, message, sampled))

    def encoded(self, plain: PlainText) -> Rendered:
        """Return the tokens of all pieces."""
        for piece, message, _ in self._pieces:
            if isinstance(piece, str) and not is_unicode(piece):
                where = f"message {message}" if message >= 0 else "a tool"
                raise ConversationError(
                    f"{where}: its text has half of a surrogate pair, as \\ud800; remove it"
                )
        texts = iter(plain.encode([piece for piece, *_ in self._pieces if isinstance(piece, str)]))
        rows = [next(texts) if isinstance(piece, str) else [piece] for piece, *_ in self._pieces]
        counts = [len(row) for row in rows]
        return Rendered(
            tokens=np.array([token for row in rows for token in row], dtype=np.int32),
            sampled=np.repeat([sampled for *_, sampled in self._pieces], counts),
            message=np.repeat(np.array([m for _, m, _ in self._pieces], dtype=np.int32), counts),
        )


class TextDialect(Dialect):
    """Dialect that encodes plain text and renders no conversation.

    ``reason`` is the error that messages get. Raises ConfigError if ``tokenizer`` has no eos_token,
    without which no text could end, and neither does its folder.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", reason: str):
        place = repr(tokenizer.name_or_path)
        self.stop_token_ids = read_stop_token_ids(tokenizer)
        has_stop = bool(self.stop_token_ids)
        require(has_stop, f"model.hf_path: the tokenizer in {place} has no eos_token")
        self.tokenizer = tokenizer
        self._reason = reason
        self._control = ControlTokens(tokenizer)

    def render(self, *conversation: Any, **options: Any) -> NoReturn:
        """Raise ConversationError."""
        raise ConversationError(self._reason)

    continuation = render

    def parse(self, prompt: Tokens, answer: Tokens) -> AssistantTurn:
        """Return the text of ``answer``."""
        text = self.tokenizer.decode([word for word in answer if word not in self.stop_token_ids])
        return AssistantTurn(content=text)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of ``text``. Raises ConversationError if it has a control token."""
        self._control.refuse_in(text, "text")
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def is_unicode(text: str) -> bool:
    """Whether ``text`` has no half of a surrogate pair, which no tokenizer can encode."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)
