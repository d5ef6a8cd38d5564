"""Answers of the API, whole or as a stream of server-sent events."""

import itertools
import json
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from tokenizers.decoders import DecodeStream

from rl.dialects.dialect import Dialect
from rl.types import Completion
from rl.types.routed_experts import RoutedExperts

DONE = "data: [DONE]\n\n"
REPLACEMENT = "\ufffd"
"""Character that stands for bytes that are no text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One answer to a request."""

    prompt: list[int]
    completion: Completion
    message: dict[str, Any] | None = None
    """The answer as a message, of chats."""
    text: str = ""
    """The answer as text, of completions; it begins with the prompt if the client wants that."""

    @property
    def finish_reason(self) -> str:
        """Reason for the end, in the API's words."""
        reason = self.completion.finish_reason
        calls = (self.message or {}).get("tool_calls")
        return "tool_calls" if calls and reason == "stop" else reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Form in which the answers to a request are written."""

    name: str
    model: str
    dialect: Dialect
    logprobs: bool = False
    token_ids: bool = False
    usage: bool = True
    """Whether the last event of a stream has the usage."""

    def chat(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the answer of ``/v1/chat/completions``."""
        return {
            **self.head("chat.completion"),
            "choices": [
                {
                    "index": index,
                    "message": choice.message,
                    **self._end(choice),
                    **({"token_ids": choice.completion.tokens} if self.token_ids else {}),
                }
                for index, choice in enumerate(choices)
            ],
            "usage": usage(choices),
            **({"prompt_token_ids": choices[0].prompt} if self.token_ids else {}),
        }

    def completions(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the answer of ``/v1/completions``."""
        rows = [self._text_row(index, choice) for index, choice in enumerate(choices)]
        return {**self.head("text_completion"), "choices": rows, "usage": usage(choices)}

    def generated(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the answer of ``/inference/v1/generate``."""
        return {
            "request_id": self.name,
            "model": self.model,
            "created": int(time.time()),
            "choices": [
                {
                    "index": index,
                    "finish_reason": choice.finish_reason,
                    "token_ids": choice.completion.tokens,
                    "versions": choice.completion.versions,
                    "logprobs": {"content": _generated(choice)} if self.logprobs else None,
                }
                for index, choice in enumerate(choices)
            ],
            "prompt_token_ids": choices[0].prompt,
            "usage": usage(choices),
        }

    def chat_events(self, choices: Sequence[Choice]) -> Iterator[str]:
        """Yield the events of a streamed ``/v1/chat/completions``."""
        for index, choice in enumerate(choices):
            assert choice.message is not None, "chats have messages"
            for delta in _deltas(choice.message):
                yield self._chunk(index, {"delta": delta, "finish_reason": None})
            yield self._chunk(index, {"delta": {}, **self._end(choice)})
        if self.usage:
            head = self.head("chat.completion.chunk")
            yield event({**head, "choices": [], "usage": usage(choices)})

    def completion_events(self, choices: Sequence[Choice]) -> Iterator[str]:
        """Yield the events of a streamed ``/v1/completions``."""
        head = self.head("text_completion")
        for index, choice in enumerate(choices):
            yield event({**head, "choices": [self._text_row(index, choice)]})
        if self.usage:
            yield event({**head, "choices": [], "usage": usage(choices)})

    def head(self, kind: str, created: str = "created") -> dict[str, Any]:
        """Return the begin of an answer of this ``kind``; ``created`` is the name of its time."""
        return {"id": self.name, "object": kind, created: int(time.time()), "model": self.model}

    def _chunk(self, index: int, row: dict[str, Any]) -> str:
        head = self.head("chat.completion.chunk")
        return event({**head, "choices": [{"index": index, **row}]})

    def _end(self, choice: Choice) -> dict[str, Any]:
        rows = {"content": self._logprob_rows(choice)} if self.logprobs else None
        return {"finish_reason": choice.finish_reason, "logprobs": rows}

    def _logprob_rows(self, choice: Choice) -> list[dict[str, Any]]:
        completion = choice.completion
        tokens: list[int] = completion.tokens
        logprobs: list[float | None] = [*completion.logprobs]
        tops = completion.top_logprobs or [{}] * len(tokens)
        if completion.prompt_logprobs is not None:
            tokens = [*choice.prompt, *tokens]
            logprobs = [None, *completion.prompt_logprobs[1:], *logprobs]
            tops = [*(completion.prompt_top or [{}] * len(choice.prompt)), *tops]
        decode = cache(lambda token: self.dialect.tokenizer.decode([token]))

        def row(token: int, logprob: float | None) -> dict[str, Any]:
            word = decode(token)
            is_part = REPLACEMENT in word  # a part of a character
            own = None if is_part else [*word.encode()]
            return {"token": word, "bytes": own, "logprob": logprob}

        return [
            {**row(token, logprob), "top_logprobs": [row(*each) for each in top.items()]}
            for token, logprob, top in zip(tokens, logprobs, tops, strict=True)
        ]

    def _offsets(self, choice: Choice) -> list[int]:
        """Return the place in the text at which each token begins whose log-prob is returned; that
        of a part of a character is the place after the last whole one.
        """
        completion = choice.completion
        given = [] if completion.prompt_logprobs is None else choice.prompt
        decoded = DecodeStream(skip_special_tokens=False)
        backend = self.dialect.tokenizer.backend_tokenizer
        steps = (decoded.step(backend, token) for token in (*given, *completion.tokens))
        ends = itertools.accumulate((len(text or "") for text in steps), initial=0)
        return [min(end, len(choice.text)) for end in ends][:-1]

    def _text_row(self, index: int, choice: Choice) -> dict[str, Any]:
        ids = {"token_ids": choice.completion.tokens, "prompt_token_ids": choice.prompt}
        rows = self._logprob_rows(choice) if self.logprobs else []
        has_top = choice.completion.top_logprobs is not None
        columns = {
            "tokens": [row["token"] for row in rows],
            "token_logprobs": [row["logprob"] for row in rows],
            "top_logprobs": [*map(_by_word, rows)] if has_top else None,
            "text_offset": self._offsets(choice),
        }
        return {
            "index": index,
            "text": choice.text,
            "finish_reason": choice.finish_reason,
            "logprobs": columns if self.logprobs else None,
            **(ids if self.token_ids else {}),
        }


def event(row: dict[str, Any]) -> str:
    """Return ``row`` as a server-sent event."""
    return f"data: {json.dumps(row)}\n\n"


def usage(choices: Sequence[Choice]) -> dict[str, int]:
    """Return the numbers of tokens; a prompt of several choices counts once."""
    prompts = sum(
        len(prompt) for prompt in {id(each.prompt): each.prompt for each in choices}.values()
    )
    sampled = sum(len(each.completion.tokens) for each in choices)
    return {
        "prompt_tokens": prompts,
        "completion_tokens": sampled,
        "total_tokens": prompts + sampled,
    }


def until(holds: Callable[[list[int]], bool], completion: Completion) -> Completion:
    """Return ``completion`` up to the first token with which ``holds`` is true of its tokens."""
    if not holds(completion.tokens):
        return completion
    places = range(len(completion.tokens) + 1)
    count = bisect_left(places, True, lo=1, key=lambda place: holds(completion.tokens[:place]))
    mask = completion.sampling_mask
    experts = completion.experts
    end = count - len(completion.tokens)
    top = completion.top_logprobs
    return replace(
        completion,
        tokens=completion.tokens[:count],
        logprobs=completion.logprobs[:count],
        versions=completion.versions[:count],
        finish_reason="stop",
        sampling_mask=None if mask is None else mask.select(np.arange(count)),
        top_logprobs=None if top is None else top[:count],
        experts=None if experts is None else RoutedExperts(experts.ids[: len(experts) + end]),
    )


def _by_word(row: dict[str, Any]) -> dict[str, float] | None:
    """Return the log-probs at a token by text: the highest of each text, of which its own is one;
    None for the first token of a prompt, which has none.
    """
    if row["logprob"] is None:
        return None
    found: dict[str, float] = {}
    for each in [row, *row["top_logprobs"]]:
        word = each["token"]
        found[word] = max(each["logprob"], found.get(word, each["logprob"]))
    return found


def _generated(choice: Choice) -> list[dict[str, Any]]:
    """Return the log-probs of an answer with both spellings of token ids that clients read."""
    completion = choice.completion
    return [
        {"token": f"token_id:{token}", "token_id": token, "logprob": logprob, "top_logprobs": []}
        for token, logprob in zip(completion.tokens, completion.logprobs, strict=True)
    ]


def _deltas(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": ""}
    for name in ("reasoning_content", "content"):
        if message.get(name):
            yield {name: message[name]}
    for index, call in enumerate(message.get("tool_calls", [])):
        yield {"tool_calls": [{"index": index, **call}]}
