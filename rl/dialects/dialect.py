"""The protocol of a dialect, and the checks of messages that all dialects share."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from rl.errors import shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Messages = Sequence[Mapping[str, Any]]
"""Messages, or tools, in the form of the Chat Completions API."""
Tokens = Sequence[int]

ROLES = ("system", "user", "assistant", "tool")
UNREAD = {
    "function_call": "write 'tool_calls'",
    "thinking": "write 'reasoning_content'",
}
"""Keys of messages that other formats have and no dialect here reads, with what to do instead."""


SPEAKERS = {
    **{"human": "user", "gpt": "assistant", "function_call": "assistant"},
    **dict.fromkeys(("function", "function_response", "observation"), "tool"),
    **{role: role for role in ROLES},
}
"""Roles by what ShareGPT's messages have in ``from``."""
CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
OUTPUT = re.compile(r"<tool_response>\n?(.*?)\n?</tool_response>\s*", re.DOTALL)
CALL_FORM = '"tool_calls": [{"function": {"name": …, "arguments": {…}}}]'


class ConversationError(ValueError):
    """A conversation cannot be rendered exactly; the text names the message, the cause and the
    fix.
    """


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rendered:
    """Tokens of a conversation, with their origin. Three arrays of one length T."""

    tokens: np.ndarray
    """int32 [T]."""
    sampled: np.ndarray
    """bool [T]. Whether the assistant would have sampled the token: its thinking, content, tool
    calls and the token that stops it. False for templates and for text of other roles."""
    message: np.ndarray
    """int32 [T]. Index of the message that the token belongs to. -1 for a generation prompt, and
    for the tools if no system message comes first."""

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """Tool call in an answer of the model."""

    name: str
    arguments: dict[str, Any]
    error: str = ""
    """Reason for which the call cannot be read, in words for the model; then ``name`` and
    ``arguments`` are empty."""
    id: str = ""
    """Id that the model gave the call, as Mistral's do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantTurn:
    """Parts of a sampled answer."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    is_reasoning_open: bool = False
    """Whether the answer ends within its thinking."""

    @property
    def message(self) -> dict[str, Any]:
        """The answer in the form of the Chat Completions API, with the calls that can be read."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        calls = [call for call in self.tool_calls if not call.error]
        if calls:
            message["tool_calls"] = [
                {
                    "type": "function",
                    "function": {"name": tool_call.name, "arguments": tool_call.arguments},
                }
                for tool_call in calls
            ]
        return message


class Markup(NamedTuple):
    """Control tokens between the parts of an answer; -1 for one that a format lacks."""

    stops: tuple[int, ...]
    think: int = -1
    think_end: int = -1
    tool_call: int = -1
    tool_call_end: int = -1
    """If a format lacks it, calls end with the answer, and may be in a list."""
    arguments: str = "arguments"
    """Key of the arguments of a call."""
    is_bare: bool = False
    """Whether an answer that is a call needs no control token."""


class Dialect(Protocol):
    """Chat format of a model family."""

    tokenizer: "PreTrainedTokenizerFast"

    stop_token_ids: tuple[int, ...]
    """Tokens that end an assistant's turn."""

    markup: Markup = Markup(())
    """Control tokens by which :meth:`parse` tells the parts apart."""

    def render(
        self,
        messages: Messages,
        tools: Messages | None = None,
        *,
        add_generation_prompt: bool = False,
        enable_thinking: bool = True,
    ) -> Rendered:
        """Return the tokens of a whole conversation.

        ``messages`` and ``tools`` are in the form of the Chat Completions API, with
        ``reasoning_content`` for thinking. Raises ConversationError if they cannot be rendered.
        """
        ...

    def parse(self, prompt: Tokens, answer: Tokens) -> AssistantTurn:
        """Return the parts of an ``answer`` that was sampled after ``prompt``."""
        ...

    def continuation(
        self, prompt: Tokens, answer: Tokens, messages: Messages, *, enable_thinking: bool = True
    ) -> list[int]:
        """Return the tokens that follow ``prompt`` and ``answer``, up to the next answer.

        They close an answer that was cut off, hold ``messages``, which no assistant wrote, and end
        with the generation prompt. Raises ConversationError if a token before would have to change.
        """
        ...

    def call_begin(self, name: str | None, *, enable_thinking: bool = True) -> list[int]:
        """Return the tokens with which an answer begins a call of tool ``name``, or with None of
        any tool. Raises ConversationError if the format has none.
        """
        raise ConversationError("this chat format cannot force a tool call; leave tool_choice out")

    def with_options(self, options: Mapping[str, Any]) -> "Dialect":
        """Return the dialect of the chat template with ``options``, its arguments by name. Raises
        ConversationError if the format has none.
        """
        names = ", ".join(options)
        raise ConversationError(
            f"this chat format has no option {names}, only enable_thinking; remove it"
        )

    def encode(self, text: str) -> list[int]:
        """Return the tokens of ``text`` outside of any template, none of them a control token.

        Raises ConversationError if this is impossible.
        """
        ...


def checked_messages(messages: Messages) -> list[dict[str, Any]]:
    """Return the messages with only the keys that dialects read. ``reasoning`` is read as
    ``reasoning_content``, and arguments of a call that are None, null or empty as no arguments.

    Each has ``role`` and ``content`` (text), an assistant's also ``reasoning_content`` (text or
    None) and ``tool_calls`` (a list of ``{"function": {"name": …, "arguments": …}}``). Raises
    ConversationError, naming the message.
    """
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise ConversationError("there are no messages; write a list with at least one")
    return [_checked(f"message {index}", message) for index, message in enumerate(messages)]


def outside_messages(messages: Messages) -> list[dict[str, Any]]:
    """Return :func:`checked_messages` that follow an answer. Raises ConversationError if one is the
    assistant's.
    """
    turns = checked_messages(messages)
    for index, turn in enumerate(turns):
        if turn["role"] == "assistant":
            raise ConversationError(
                f"message {index}: an assistant's message cannot follow an answer; sample it"
            )
    return turns


def joined_text(content: Any) -> Any:
    """Return parts of text, as the Chat Completions API has them, as one text. Return other content
    as it is.
    """
    parts = content if isinstance(content, list) else []
    parts = [part if isinstance(part, Mapping) else {} for part in parts]
    texts = [part.get("text") if part.get("type") == "text" else None for part in parts]
    return "".join(map(str, texts)) if texts and None not in texts else content


def usual_messages(messages: Sequence[Any], *, parse: bool = True) -> list[Any]:
    """Return the messages of a data set in the form that dialects read.

    ShareGPT's ``from`` and ``value`` become role and content, parts of text become one text, and
    the role ``developer`` becomes ``system``. With ``parse``, ``<tool_call>`` text of the assistant
    becomes tool calls, and ``<tool_response>`` text after a call becomes messages of tools. Raises
    ConversationError, naming the message, if a call cannot be read.
    """
    usual = list[Any]()
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            usual.append(message)
            continue
        if "from" in message and "role" not in message:
            message = _of_sharegpt(f"message {index}", message)
        role = message.get("role")
        content = joined_text(message.get("content"))
        same = {**message, "content": content}
        if role == "developer":
            same["role"] = "system"
        last = usual[-1] if usual and isinstance(usual[-1], Mapping) else {}
        is_output = role == "tool" or last.get("tool_calls") or last.get("role") == "tool"
        if not parse or not isinstance(content, str):
            usual.append(same)
        elif role == "assistant" and CALL.search(content):
            usual.append(_with_calls(f"message {index}", message, content))
        elif role in ("user", "tool") and is_output and not OUTPUT.sub("", content).strip():
            outputs = OUTPUT.findall(content) or [content]
            usual += [{**same, "role": "tool", "content": output} for output in outputs]
        else:
            usual.append(same)
    return usual


def _of_sharegpt(where: str, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message of ShareGPT's form in that of the Chat Completions API."""
    rest = {key: field for key, field in message.items() if key not in ("from", "value")}
    speaker, value = message["from"], message.get("value")
    role = SPEAKERS.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        allowed = ", ".join(SPEAKERS)
        raise ConversationError(f"{where}: from is {shown(speaker)}; allowed are {allowed}")
    if speaker == "function_call":
        return _with_calls(where, {**rest, "role": role}, f"<tool_call>{value}</tool_call>")
    return {**rest, "role": role, "content": value}


def _with_calls(where: str, message: Mapping[str, Any], content: str) -> dict[str, Any]:
    """Return an assistant's message with the calls in ``content`` as its tool calls."""
    text = content[: content.index("<tool_call>")].rstrip()
    if message.get("tool_calls") or CALL.sub("", content).rstrip() != text:
        raise ConversationError(
            f"{where}: its content has a tool call among other text or beside tool_calls; write "
            f"{CALL_FORM}"
        )
    calls = []
    for body in CALL.findall(content):
        try:
            call = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ConversationError(
                f"{where}: the tool call {shown(body.strip())} in its content is not JSON: {error}"
                f"; write {CALL_FORM}"
            ) from None
        calls.append({"function": call})
    return {**message, "content": text, "tool_calls": calls}


def checked_tools(tools: Messages | None) -> list[Mapping[str, Any]]:
    """Return the tools as a list. Raises ConversationError unless each is an object."""
    if tools is None:
        return []
    if isinstance(tools, str) or not isinstance(tools, Sequence):
        raise ConversationError(f"tools is {shown(tools)}; write a list of JSON schemas")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise ConversationError(f"tool {index} is {shown(tool)}; write a JSON schema")
    return list(tools)


def as_json(where: str, value: Any) -> str:
    """Return ``value`` as chat templates write it. Raises ConversationError if it is not JSON."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConversationError(f"{where}: {shown(value)} is not JSON: {error}") from None


def _checked(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ConversationError(f"{where} is {shown(message)}; write an object with role, content")
    role = message.get("role")
    if role not in ROLES:
        raise ConversationError(f"{where}: role is {shown(role)}; allowed are {', '.join(ROLES)}")
    for key, fix in UNREAD.items():
        if message.get(key) is not None:
            raise ConversationError(f"{where}: {key!r} is not read; {fix}")
    result: dict[str, Any] = {"role": role}
    calls = _calls(where, message)
    thinking = message.get("reasoning_content")
    if thinking is None:
        thinking = message.get("reasoning")
    if role == "assistant":
        result |= {"reasoning_content": thinking, "tool_calls": calls}
    elif calls or thinking is not None:
        raise ConversationError(f"{where}: only an assistant has tool_calls, reasoning_content")
    if not (thinking is None or isinstance(thinking, str)):
        raise ConversationError(f"{where}: reasoning_content is {shown(thinking)}; write text")
    content = message.get("content")
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        fix = "write one text" if isinstance(content, list) else "write text, or '' for none"
        raise ConversationError(f"{where}: content is {shown(content)}; {fix}")
    if role == "tool" and isinstance(message.get("tool_call_id"), str):
        result["tool_call_id"] = message["tool_call_id"]
    return result | {"content": content}


def _calls(where: str, message: Mapping[str, Any]) -> list[dict[str, Any]]:
    calls = message.get("tool_calls")
    if calls is None:
        return []
    if isinstance(calls, str) or not isinstance(calls, Sequence):
        raise ConversationError(f"{where}: tool_calls is {shown(calls)}; write a list of calls")
    return [_call(f"{where}: tool call {index}", call) for index, call in enumerate(calls)]


def _call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") or call if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise ConversationError(
            f'{where} is {shown(call)}; write {{"function": {{"name": …, "arguments": …}}}}'
        )
    arguments = function.get("arguments")
    # some clients write a call without arguments so
    if arguments is None or str(arguments).strip() in ("", "null"):
        arguments = {}
    parsed = arguments
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise ConversationError(f"{where}: its arguments are not JSON: {error}") from None
    if not isinstance(parsed, Mapping):
        raise ConversationError(f"{where}: its arguments are {shown(arguments)}; write an object")
    result = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return result | ({"id": call["id"]} if isinstance(call.get("id"), str) else {})
