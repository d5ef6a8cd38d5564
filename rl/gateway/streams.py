"""Answers as streams of server-sent events."""

import asyncio
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rl.dialects.answers import TextReader
from rl.gateway.answers import Choice, Form, usage
from rl.gateway.drafts import Draft

DONE = "data: [DONE]\n\n"


class Stream:
    """Events of the answers to a request, for one client. ::

    stream = ChatStream(form)
    stream.events(choices)      # what is new, any number of times
    stream.end(choices)
    """

    kind: str
    """Name of the objects that events have."""

    def __init__(self, form: Form):
        self.form = form
        self._sent: dict[int, Choice] = {}

    def events(self, choices: Iterable[Choice | None]) -> Iterator[str]:
        """Yield what ``choices`` have more than before. A choice without new text waits for more or
        for its end. Raises ApiError if a choice does not begin as it did.
        """
        for index, now in enumerate(choices):
            before = self._sent.get(index)
            if now is None:
                continue
            new = now.since(before)
            if now.is_whole or any(new.texts):
                self._sent[index] = now
                yield from self.write(index, new, now, is_first=before is None)

    def write(self, index: int, new: Choice, now: Choice, *, is_first: bool) -> Iterator[str]:
        """Yield the events of ``new``, the new part of ``now``."""
        raise NotImplementedError

    def end(self, choices: Sequence[Choice]) -> Iterator[str]:
        """Yield what follows all choices."""
        if self.form.usage:
            yield self.chunk(usage=usage(choices))
        yield DONE

    def chunk(self, *rows: dict[str, Any], **more: Any) -> str:
        """Return an event with ``rows`` of choices."""
        return event({**self.form.head(self.kind), "choices": rows, **more})


class ChatStream(Stream):
    """Stream of ``/v1/chat/completions``."""

    kind = "chat.completion.chunk"

    def write(self, index: int, new: Choice, now: Choice, *, is_first: bool) -> Iterator[str]:
        """Yield the role, each part of the message, and the end. The first event after the role has
        the tokens.
        """
        if is_first:
            row = {"index": index, "delta": {"role": "assistant", "content": ""}}
            ids = {"prompt_token_ids": now.prompt} if self.form.token_ids else {}
            yield self.chunk(row | {"finish_reason": None}, **ids)
        thought, said, _ = new.texts
        deltas: list[dict[str, Any]] = [{"reasoning_content": thought}] if thought else []
        deltas += [{"content": said}] if said else []
        for place, call in enumerate((new.message or {}).get("tool_calls", [])):
            deltas.append({"tool_calls": [{"index": place, **call}]})
        for delta in [*deltas, {}] if new.is_whole else deltas:
            reason = None if delta else new.finish_reason
            choice = {"index": index, "delta": delta, "finish_reason": reason}
            yield self.chunk(choice | self.form.tokens(new))
            new = new.since(new)


class CompletionStream(Stream):
    """Stream of ``/v1/completions``."""

    kind = "text_completion"

    def __init__(self, form: Form):
        super().__init__(form)
        self._readers = defaultdict[int, TextReader](partial(TextReader, form.dialect.tokenizer))

    def write(self, index: int, new: Choice, now: Choice, *, is_first: bool) -> Iterator[str]:
        """Yield the new text with its tokens."""
        length = len(now.text) if now.is_whole else sys.maxsize
        row = self.form.text_row(index, new, self._readers[index], length)
        if not is_first:
            row.pop("prompt_token_ids", None)
        yield self.chunk(row)


@dataclass(frozen=True, slots=True)
class Reply:
    """Answers to a request in the making, and how they are written."""

    choices: asyncio.Future[list[Choice]]
    drafts: list[Draft]
    """Drafts of the choices, of a stream."""
    whole: Callable[[list[Choice]], dict[str, Any]]
    stream: Stream | None
    """None if the client wants no stream."""
    is_kept: bool
    """Whether the answers are sampled on if the client goes."""


def event(row: dict[str, Any]) -> str:
    """Return ``row`` as a server-sent event."""
    return f"data: {json.dumps(row)}\n\n"
