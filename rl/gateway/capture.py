"""Conversations of a session, token for token."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from rl.dialects.dialect import (
    AssistantTurn,
    ConversationError,
    Dialect,
    joined_text,
)
from rl.types import Completion
from rl.types.sequences import OpenSequence, SequenceLog


@dataclass(frozen=True, slots=True)
class Opened:
    """Prompt of an answer."""

    tokens: list[int]
    key: bytes
    """Key of the history, which the answer is added to."""
    answer_tokens: int = 0
    """Number of tokens at the end that are a part of the answer."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """An answer in its sequence: tokens ``begin`` to ``end`` of ``sequence``."""

    sequence: OpenSequence
    begin: int
    end: int


@dataclass(eq=False)
class Capture:
    """Answers of a session, and the prompts that continue them. ::

        opened = capture.open(messages, tools)
        completion = ...                            # sampled after opened.tokens
        message = capture.answer(opened, completion)

    Messages that begin with those of an earlier request and its answer, and go on with messages
    that no assistant wrote, are continued from the tokens of that answer. Nothing that was sampled
    is rendered again. All other messages are rendered, and begin a new sequence.

    Two messages are the same if role, content, tool calls and ids of tool calls are; the spacing of
    JSON and thoughts that were left out make no difference.

    ``name`` is a part of the ids of tool calls. Captures that answer the same conversation need
    names of their own, since clients take equal ids for the same call.
    """

    dialect: Dialect
    name: str = ""
    log: SequenceLog = field(default_factory=SequenceLog, init=False)
    turns: int = field(default=0, init=False)
    """Number of answers."""
    tokens: int = field(default=0, init=False)
    """Number of tokens of all prompts and answers."""
    malformed: int = field(default=0, init=False)
    """Number of tool calls that could not be read."""
    rewritten: int = field(default=0, init=False)
    """Number of requests after the first answer that continue none."""
    _turns: dict[bytes, _Turn] = field(default_factory=dict, init=False)
    _texts: dict[str, _Turn] = field(default_factory=dict, init=False)

    def open(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        enable_thinking: bool = True,
        variables: Mapping[str, str] | None = None,
        forced: tuple[str | None] | None = None,
    ) -> Opened:
        """Return the prompt for an answer to ``messages``; with ``forced``, it ends with the begin
        of a call of that tool, or with None of any tool. ``variables`` are more variables of the
        chat template. Raises ConversationError.
        """
        turns = [normal(message) for message in messages]
        options = {"enable_thinking": enable_thinking, **(variables or {})}
        dialect = self._dialect(variables or {})
        keys = [_hash(b"", json.dumps([tools or None, options], sort_keys=True))]
        for message in turns:
            keys.append(_hash(keys[-1], key_of(message)))
        tokens = self._continued(dialect, turns, keys, enable_thinking)
        if tokens is None:
            rendered = dialect.render(
                turns, tools or None, add_generation_prompt=True, enable_thinking=enable_thinking
            )
            self.rewritten += bool(self.turns)
            tokens = rendered.tokens.tolist()
        if forced is None:
            return Opened(tokens, keys[-1])
        begin = self.dialect.call_begin(*forced, enable_thinking=enable_thinking)
        return Opened([*tokens, *begin], keys[-1], len(begin))

    def _dialect(self, variables: Mapping[str, str]) -> Dialect:
        """Return the dialect with ``variables``. Raises ConversationError if the chat template does
        not read one of them.
        """
        template = str(self.dialect.tokenizer.chat_template)
        for name in variables:
            if name not in template:
                raise ConversationError(f"the chat template does not read {name}; leave it out")
        return self.dialect.with_options(variables) if variables else self.dialect

    def _continued(
        self,
        dialect: Dialect,
        messages: Sequence[Mapping[str, Any]],
        keys: Sequence[bytes],
        enable_thinking: bool,
    ) -> list[int] | None:
        """Return the tokens of an earlier answer, of those before it, and of the messages after it;
        None if the messages continue no answer.
        """
        for known in range(len(messages) - 1, 0, -1):
            if messages[known]["role"] == "assistant":
                break
            if turn := self._turns.get(keys[known]):
                prompt = turn.sequence.tokens[: turn.begin]
                answer = turn.sequence.tokens[turn.begin : turn.end]
                with suppress(ConversationError):  # then the whole conversation is rendered
                    more = dialect.continuation(
                        prompt, answer, messages[known:], enable_thinking=enable_thinking
                    )
                    return [*prompt, *answer, *more]
                break
        return None

    def answer(
        self, opened: Opened, completion: Completion, stops: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Note an answer; return it as a message, with ids for its tool calls.

        Its texts end before the first of ``stops``. Such an answer is not continued, since its
        tokens have more than its message.
        """
        whole = self.parse(opened, completion.tokens)
        content, reasoning = before(whole.content, stops), before(whole.reasoning, stops)
        turn = replace(whole, content=content, reasoning=reasoning)
        self.malformed += sum(bool(call.error) for call in turn.tool_calls)
        message = _message(turn, f"call_{self.name}{self.turns}")
        noted = self.add(opened.tokens, completion)
        noted = replace(noted, begin=noted.begin - opened.answer_tokens)
        if turn == whole:
            self._turns[_hash(opened.key, key_of(normal(message)))] = noted
        return message

    def parse(self, opened: Opened, answer: Sequence[int]) -> AssistantTurn:
        """Return the parts of an answer, of which ``opened`` may have the begin."""
        place = len(opened.tokens) - opened.answer_tokens
        return self.dialect.parse(opened.tokens[:place], [*opened.tokens[place:], *answer])

    def open_text(self, text: str) -> list[int]:
        """Return the prompt for a completion of ``text``; the control tokens in it count."""
        encode = self.dialect.tokenizer.encode
        known = max(filter(text.startswith, [*self._texts]), key=len, default=None)
        if known is None:
            self.rewritten += bool(self.turns)
            return encode(text)
        turn = self._texts[known]
        rest = text[len(known) :]
        more = encode(rest, add_special_tokens=False) if rest else []
        return [*turn.sequence.tokens[: turn.end], *more]

    def answer_text(
        self, text: str, prompt: Sequence[int], completion: Completion, stops: Sequence[str] = ()
    ) -> str:
        """Note a completion of ``text``; return its own text, which ends before ``stops``."""
        whole = self.decode(completion)
        said = before(whole, stops)
        noted = self.add(prompt, completion)
        if said == whole:
            self._texts[text + said] = noted
        return said

    def decode(self, completion: Completion) -> str:
        """Return the text of a completion without its stop token."""
        tokens = completion.tokens
        ends = bool(tokens) and tokens[-1] in self.dialect.stop_token_ids
        return self.dialect.tokenizer.decode(tokens[:-1] if ends else tokens)

    def add(self, prompt: Sequence[int], completion: Completion) -> _Turn:
        """Note an answer in tokens."""
        sequence = self.log.add(prompt, completion)
        self.turns += 1
        self.tokens += len(prompt) + len(completion.tokens)
        end = len(sequence.tokens)
        return _Turn(sequence, end - len(completion.tokens), end)

    @property
    def counts(self) -> dict[str, float]:
        """Numbers of sequences, rewritten histories and malformed calls."""
        return {
            "sequences": float(len(self.log.sequences)),
            "rewritten": float(self.rewritten),
            "malformed_calls": float(self.malformed),
        }


def before(text: str, stops: Sequence[str]) -> str:
    """Return ``text`` up to the first of ``stops`` in it."""
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]


def normal(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``message`` with the content as one text, and its role as chat templates have it.

    Raises ConversationError if a part of the content is not text.
    """
    role = message.get("role")
    content = joined_text(message.get("content"))
    if isinstance(content, list):
        raise ConversationError(f"a part of the {role}'s content is not text; write text only")
    if role == "assistant" and content is None:
        content = ""
    return {**message, "role": "system" if role == "developer" else role, "content": content}


def key_of(message: Mapping[str, Any]) -> str:
    """Return a text that is equal for equal messages."""
    calls = message.get("tool_calls")
    call_keys = [_call_key(call) for call in calls] if isinstance(calls, list) else []
    return json.dumps([message["role"], message["content"], call_keys, message.get("tool_call_id")])


def _call_key(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments") or {}  # "" and None are the same call
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return [call.get("id"), function.get("name"), json.dumps(arguments, sort_keys=True)]


def _hash(before: bytes, text: str) -> bytes:
    return hashlib.blake2b(before + text.encode(), digest_size=16).digest()


def _message(turn: AssistantTurn, call_id: str) -> dict[str, Any]:
    """Return the message of an answer as the API has it: arguments are text, calls have ids."""
    message = {**turn.message}
    calls = message.get("tool_calls", [])
    if calls:
        message["tool_calls"] = [
            {
                "id": f"{call_id}_{number}",
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
                },
            }
            for number, call in enumerate(calls)
        ]
        message["content"] = message["content"] or None
    return message
