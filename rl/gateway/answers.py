"""Answers of the API."""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

from rl.dialects.answers import REPLACEMENT, TextReader
from rl.dialects.dialect import Dialect
from rl.gateway.protocol import ApiError
from rl.types import Completion
from rl.types.routed_experts import RoutedExperts

LOST = "a generator was lost, and its answer was sampled again with other tokens; try again"
BYTES_OF_A_VALUE = 32
"""Size of a token, or of a log-prob of another id, in an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One answer to a request."""

    prompt: list[int]
    completion: Completion
    message: dict[str, Any] | None = None
    """The answer as a message, of chats."""
    text: str = ""
    """The answer as text, of completions; it begins with the prompt if the client wants that."""
    is_whole: bool = True
    """Whether it has ended."""

    @property
    def finish_reason(self) -> str | None:
        """Reason for the end, in the API's words; None before it."""
        reason = self.completion.finish_reason
        calls = (self.message or {}).get("tool_calls")
        ended = "tool_calls" if calls and reason == "stop" else reason
        return ended if self.is_whole else None

    @property
    def texts(self) -> tuple[str, str, str]:
        """Thought and content of a message, and text of a completion."""
        message = self.message or {}
        return message.get("reasoning_content") or "", message.get("content") or "", self.text

    def since(self, before: "Choice | None") -> "Choice":
        """Return what the answer has more than ``before``, an earlier state of it. Raises ApiError
        if it does not begin so.
        """
        if before is None:
            return self
        count = len(before.completion.tokens)
        pairs = [*zip(self.texts, before.texts, strict=True)]
        is_same = self.completion.tokens[:count] == before.completion.tokens
        if not (is_same and all(now.startswith(then) for now, then in pairs)):
            raise ApiError(500, LOST, code="sampling_failed")
        thought, said, text = (now[len(then) :] for now, then in pairs)
        rest = sliced(self.completion.without_mask(), count, len(self.completion.tokens))
        return replace(
            self,
            completion=replace(rest, prompt_logprobs=None, prompt_top=None),
            message=self.message
            and {**self.message, "reasoning_content": thought, "content": said},
            text=text,
        )


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
    created: int = field(default_factory=lambda: int(time.time()))

    def chat(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the answer of ``/v1/chat/completions``."""
        return {
            **self.head("chat.completion"),
            "choices": [
                {
                    "index": index,
                    "message": choice.message,
                    "finish_reason": choice.finish_reason,
                    **self.tokens(choice),
                }
                for index, choice in enumerate(choices)
            ],
            "usage": usage(choices),
            **({"prompt_token_ids": choices[0].prompt} if self.token_ids else {}),
        }

    def completions(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the answer of ``/v1/completions``."""
        rows = [
            self.text_row(index, choice, TextReader(self.dialect.tokenizer), len(choice.text))
            for index, choice in enumerate(choices)
        ]
        return {**self.head("text_completion"), "choices": rows, "usage": usage(choices)}

    def generated(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the answer of ``/inference/v1/generate``."""
        return {
            "request_id": self.name,
            "model": self.model,
            "created": self.created,
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

    def head(self, kind: str, created: str = "created") -> dict[str, Any]:
        """Return the begin of an answer of this ``kind``; ``created`` is the name of its time."""
        return {"id": self.name, "object": kind, created: self.created, "model": self.model}

    def tokens(self, choice: Choice) -> dict[str, Any]:
        """Return the log-probs and the ids of an answer of a chat, if the client wants them."""
        rows = {"content": self._logprob_rows(choice)} if self.logprobs else None
        ids = {"token_ids": choice.completion.tokens} if self.token_ids else {}
        return {"logprobs": rows, **ids}

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
            encoded = None if is_part else [*word.encode()]
            return {"token": word, "bytes": encoded, "logprob": logprob}

        return [
            {**row(token, logprob), "top_logprobs": [row(*pair) for pair in top.items()]}
            for token, logprob, top in zip(tokens, logprobs, tops, strict=True)
        ]

    def text_row(
        self, index: int, choice: Choice, reader: TextReader, length: int
    ) -> dict[str, Any]:
        """Return an answer of ``/v1/completions``, or the part of it whose tokens are those after
        what ``reader`` has read, of a text of at most ``length``.
        """
        ids = {"token_ids": choice.completion.tokens, "prompt_token_ids": choice.prompt}
        rows = self._logprob_rows(choice) if self.logprobs else []
        has_top = choice.completion.top_logprobs is not None
        prompt = [] if choice.completion.prompt_logprobs is None else choice.prompt
        offsets = []
        for token in (*prompt, *choice.completion.tokens) if self.logprobs else ():
            offsets.append(min(reader.end, length))
            reader.read(token)
        columns = {
            "tokens": [row["token"] for row in rows],
            "token_logprobs": [row["logprob"] for row in rows],
            "top_logprobs": [*map(_by_word, rows)] if has_top else None,
            "text_offset": offsets,
        }
        return {
            "index": index,
            "text": choice.text,
            "finish_reason": choice.finish_reason,
            "logprobs": columns if self.logprobs else None,
            **(ids if self.token_ids else {}),
        }


def usage(choices: Sequence[Choice]) -> dict[str, int]:
    """Return the numbers of tokens; a prompt of several choices counts once."""
    prompts = sum(
        len(prompt) for prompt in {id(choice.prompt): choice.prompt for choice in choices}.values()
    )
    sampled = sum(len(choice.completion.tokens) for choice in choices)
    return {
        "prompt_tokens": prompts,
        "completion_tokens": sampled,
        "total_tokens": prompts + sampled,
    }


def size_of(completions: Iterable[Completion]) -> int:
    """Return about the number of bytes of ``completions`` as JSON."""
    return sum(
        BYTES_OF_A_VALUE * (len(completion.tokens) + len(completion.prompt_logprobs or ()))
        + BYTES_OF_A_VALUE
        * sum(map(len, (*(completion.top_logprobs or ()), *(completion.prompt_top or ()))))
        for completion in completions
    )


def until(holds: Callable[[list[int]], bool], completion: Completion) -> Completion:
    """Return ``completion`` up to the first token with which ``holds`` is true of its tokens."""
    if not holds(completion.tokens):
        return completion
    places = range(len(completion.tokens) + 1)
    count = bisect_left(places, True, lo=1, key=lambda place: holds(completion.tokens[:place]))
    return replace(sliced(completion, 0, count), finish_reason="stop")


def sliced(completion: Completion, begin: int, end: int) -> Completion:
    """Return tokens ``begin`` to ``end`` of ``completion``."""
    mask = completion.sampling_mask
    experts = completion.experts
    left = end - len(completion.tokens)
    top = completion.top_logprobs
    return replace(
        completion,
        tokens=completion.tokens[begin:end],
        logprobs=completion.logprobs[begin:end],
        versions=completion.versions[begin:end],
        sampling_mask=None if mask is None else mask.select(np.arange(begin, end)),
        top_logprobs=None if top is None else top[begin:end],
        experts=None if experts is None else RoutedExperts(experts.ids[: len(experts) + left]),
    )


def _by_word(row: dict[str, Any]) -> dict[str, float] | None:
    """Return the log-probs at a token by text: the highest of each text, of which its own is one;
    None for the first token of a prompt, which has none.
    """
    if row["logprob"] is None:
        return None
    words: dict[str, float] = {}
    for entry in [row, *row["top_logprobs"]]:
        word = entry["token"]
        words[word] = max(entry["logprob"], words.get(word, entry["logprob"]))
    return words


def _generated(choice: Choice) -> list[dict[str, Any]]:
    """Return the log-probs of an answer with both spellings of token ids that clients read."""
    completion = choice.completion
    return [
        {"token": f"token_id:{token}", "token_id": token, "logprob": logprob, "top_logprobs": []}
        for token, logprob in zip(completion.tokens, completion.logprobs, strict=True)
    ]
