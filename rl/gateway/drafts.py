"""Answers that are still being sampled."""

import asyncio
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property

from rl.dialects.answers import AnswerParts, TextReader
from rl.dialects.dialect import Dialect
from rl.gateway.answers import Choice, sliced
from rl.gateway.capture import Opened, before
from rl.types import Completion, Part

COLUMNS = ("tokens", "logprobs", "versions", "top_logprobs")
BARE_CALL = ("{", "[")
"""Begins of an answer that may become a call without a control token."""


class Draft:
    """Answer that is being sampled, up to where later tokens can change it. ::

        draft = Draft(dialect, opened, stops)
        draft.hear(part)        # the function ``on_tokens`` of a sampler
        draft.choice()

    ``lead`` is the text before that of a completion; None for the answer of a chat. White space at
    the end, calls, and what may be the begin of one of ``stops`` wait for the tokens after them.
    """

    def __init__(
        self, dialect: Dialect, opened: Opened, stops: Sequence[str], lead: str | None = None
    ):
        self._dialect = dialect
        self._opened = opened
        self._stops = stops
        self._lead = lead
        self._parts = AnswerParts(dialect.markup, dialect.tokenizer)
        for token in opened.tokens[len(opened.tokens) - opened.answer_tokens :]:
            self._parts.read(token)
        self._thought, self._said = (TextReader(dialect.tokenizer) for _ in range(2))
        self._completion: Completion | None = None
        self._ends: list[tuple[int, int]] = []
        """Number of the part that has each token, and length of the part's text up to it."""
        self._follows = True
        self._news: asyncio.Future[None] | None = None

    def hear(self, part: Part) -> None:
        """Take new tokens. A request that was sent again repeats the first ones. If they differ,
        no later ones are taken.
        """
        new = part.completion
        known = len(self._ends) - part.begin
        completion = self._completion
        if completion is None:
            completion = self._completion = new
        elif (
            self._follows
            and completion.tokens[part.begin :][: len(new.tokens)] == new.tokens[:known]
        ):
            for name in COLUMNS:
                if (values := getattr(completion, name)) is not None:
                    values.extend(getattr(new, name)[known:])
        else:
            self._follows = False
        for token in completion.tokens[len(self._ends) :]:
            self._ends.append(max([*self._ends[-1:], self._read(token)]))
        if self._news is not None:
            self._news.set_result(None)
            self._news = None

    def news(self) -> asyncio.Future[None]:
        """Return a future that is done with the next tokens."""
        if self._news is None:
            self._news = asyncio.get_running_loop().create_future()
        return self._news

    def choice(self) -> Choice | None:
        """Return the answer so far; None before its first token."""
        if self._completion is None:
            return None
        said, length = self._certain(self._said.text)
        end = 2, length
        message = None
        if self._lead is None:
            if self._dialect.markup.is_bare and said.startswith(BARE_CALL):
                said = ""
                end = 2, 0
            if self._parts.is_thinking:
                thought, length = self._certain(self._thought.text)
                end = 1, length
            else:
                thought = self._whole_thought if self._parts.thought else ""
            message = {"role": "assistant", "reasoning_content": thought, "content": said}
        return Choice(
            prompt=self._opened.tokens,
            completion=sliced(self._completion, 0, bisect_right(self._ends, end)),
            message=message,
            text="" if self._lead is None else self._lead + said,
            is_whole=False,
        )

    @cached_property
    def _whole_thought(self) -> str:
        """Text of the thought once it has ended."""
        whole = self._dialect.tokenizer.decode(self._parts.thought).strip()
        return before(whole, self._stops)

    def _read(self, token: int) -> tuple[int, int]:
        """Return the end of the next token."""
        part = self._parts.read(token) if self._lead is None else self._parts.content
        if part is self._parts.thought:
            self._thought.read(token)
            return 1, len(self._thought.text)
        if part is self._parts.content:
            self._said.read(token)
            return 2, len(self._said.text)
        return (3, 0) if self._parts.calls else (0, 0)

    def _certain(self, text: str) -> tuple[str, int]:
        """Return the part of ``text`` that no later text changes, and where it ends in ``text``."""
        is_chat = self._lead is None
        begin = len(text) - len(text.lstrip()) if is_chat else 0
        body = text[begin:]
        certain = before(body, self._stops)
        if certain == body:
            parts = (stop[:size] for stop in self._stops for size in range(1, len(stop)))
            certain = body[: len(body) - max(map(len, filter(body.endswith, parts)), default=0)]
        if is_chat:
            certain = certain.rstrip()
        return certain, begin + len(certain) if certain else 0
