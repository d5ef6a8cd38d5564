"""Responses API of OpenAI, without state, in the words of chats."""

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from pydantic import Field

from rl.errors import shown
from rl.gateway.answers import Choice, Form, usage
from rl.gateway.protocol import ApiError, Asked, ChatRequest, JsonSchema, Strict, read
from rl.gateway.streams import Stream, event

KINDS = "message, function_call, function_call_output or reasoning"


class TextFormat(JsonSchema):
    """Form of an answer, beside the fields that ``response_format`` of chats has in
    ``json_schema``.
    """

    type: Literal["text", "json_object", "json_schema"]


class Text(Strict):
    """Options of the text of an answer."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(Strict):
    """Options of the thought of an answer, which is returned whole, without a summary."""

    effort: str | None = None


class ResponseRequest(Asked):
    """Body of ``/v1/responses``."""

    input: str | list[dict[str, Any]] = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: Text | None = None
    reasoning: Reasoning | None = None
    n: Literal[1, None] = None

    def chat(self) -> ChatRequest:
        """Return the request as one of ``/v1/chat/completions``. Raises ApiError."""
        values = self.model_dump(include={*ChatRequest.model_fields}, exclude_unset=True)
        first = [{"role": "system", "content": self.instructions}] if self.instructions else []
        values["messages"] = [*first, *_messages(self.input)]
        values["max_completion_tokens"] = self.max_output_tokens
        if self.tools is not None:
            values["tools"] = [_tool(index, tool) for index, tool in enumerate(self.tools)]
        if isinstance(self.tool_choice, dict):
            name = {"name": self.tool_choice.get("name")}
            values["tool_choice"] = {"type": self.tool_choice.get("type"), "function": name}
        form = self.text and self.text.format
        if form:
            schema = form.model_dump(by_alias=True, exclude={"type"})
            values["response_format"] = {"type": form.type, "json_schema": schema}
        values["verbosity"] = self.text and self.text.verbosity
        values["reasoning_effort"] = self.reasoning and self.reasoning.effort
        return read(ChatRequest, json.dumps(values).encode())


def response_of(form: Form, request: ResponseRequest, choices: Sequence[Choice]) -> dict[str, Any]:
    """Return the answer of ``/v1/responses``."""
    (choice,) = choices
    is_cut = choice.finish_reason == "length"
    counts = usage(choices)
    return {
        **form.head("response", "created_at"),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "instructions": request.instructions,
        "metadata": {},
        "output": [*_items(form.name, choice)],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "tool_choice": request.tool_choice or "auto",
        "tools": request.tools or [],
        "usage": {
            "input_tokens": counts["prompt_tokens"],
            "output_tokens": counts["completion_tokens"],
            "total_tokens": counts["total_tokens"],
        },
    }


class ResponseStream(Stream):
    """Stream of ``/v1/responses``."""

    def __init__(self, form: Form, request: ResponseRequest):
        super().__init__(form)
        self._request = request
        self._numbers = itertools.count()
        self._texts: list[str] = []  # of the items that have begun
        self._ended = 0  # number of items

    def write(self, index: int, new: Choice, now: Choice, *, is_first: bool) -> Iterator[str]:
        """Yield the events of the items. An item ends once the next one begins."""
        response = response_of(self.form, self._request, [now])
        if is_first:
            begun = response | {"status": "in_progress", "output": [], "usage": None}
            begun["incomplete_details"] = None
            for kind in ("created", "in_progress"):
                yield self._event(f"response.{kind}", response=begun)
        items = [entry for entry in response["output"] if now.is_whole or _said(entry)]
        for place, item in enumerate(items):
            yield from self._item(place, item, ends=now.is_whole or place + 1 < len(items))
        if now.is_whole:
            yield self._event(f"response.{response['status']}", response=response)

    def end(self, choices: Sequence[Choice]) -> Iterator[str]:
        """Yield nothing: the last event has the whole response."""
        return iter(())

    def _item(self, place: int, item: dict[str, Any], *, ends: bool) -> Iterator[str]:
        parts = item.get("content", [])
        kind = parts[0]["type"] if parts else "function_call_arguments"
        where = {"output_index": place, "item_id": item["id"]}
        where |= {"content_index": 0} if parts else {}
        text = _said(item)
        if place == len(self._texts):
            self._texts.append("")
            empty: dict[str, Any] = {"content": []} if parts else {"arguments": ""}
            begun = {**item, **empty, "status": "in_progress"}
            yield self._event("response.output_item.added", output_index=place, item=begun)
            for part in parts:
                yield self._event("response.content_part.added", **where, part={**part, "text": ""})
        logprobs: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
        if new := text[len(self._texts[place]) :]:
            self._texts[place] = text
            yield self._event(f"response.{kind}.delta", **where, delta=new, **logprobs)
        if not ends or place < self._ended:
            return
        self._ended += 1
        whole = {"text": text, **logprobs} if parts else {"arguments": text, "name": item["name"]}
        yield self._event(f"response.{kind}.done", **where, **whole)
        for part in parts:
            yield self._event("response.content_part.done", **where, part=part)
        yield self._event("response.output_item.done", output_index=place, item=item)

    def _event(self, kind: str, **fields: Any) -> str:
        row = {"type": kind, "sequence_number": next(self._numbers), **fields}
        return f"event: {kind}\n{event(row)}"


def _said(item: dict[str, Any]) -> str:
    """Return the text of an item, or the arguments of a call."""
    return str(item["content"][0]["text"] if "content" in item else item["arguments"])


def _items(name: str, choice: Choice) -> Iterator[dict[str, Any]]:
    """Yield the thought, the text and the calls of an answer as items."""
    message = choice.message or {}
    end = {"status": "incomplete" if choice.finish_reason == "length" else "completed"}
    if thought := message.get("reasoning_content"):
        item = {"type": "reasoning", "id": f"rs_{name}", "summary": []}
        yield {**item, "content": [{"type": "reasoning_text", "text": thought}], **end}
    calls = message.get("tool_calls", [])
    if message.get("content") or not calls:
        text = message.get("content") or ""
        part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": []}
        item = {"type": "message", "id": f"msg_{name}", "role": "assistant"}
        yield {**item, "content": [part], **end}
    for call in calls:
        item = {"type": "function_call", "id": f"fc_{call['id']}", "call_id": call["id"]}
        yield item | call["function"] | end


def _messages(items: str | Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of items. Those of one answer become one message."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []

    def answer() -> dict[str, Any]:
        """Return the message of the answer that goes on, or of a new one."""
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        return messages[-1]

    for index, item in enumerate(items):
        match item:
            case {"type": "function_call", "call_id": id, "name": name, "arguments": arguments}:
                function = {"name": name, "arguments": arguments}
                calls = answer().setdefault("tool_calls", [])
                calls.append({"id": id, "type": "function", "function": function})
            case {"type": "function_call_output", "call_id": id, "output": output}:
                content = _text(index, output)
                messages.append({"role": "tool", "tool_call_id": id, "content": content})
            case {"type": "reasoning"}:
                answer()["reasoning_content"] = _text(index, item.get("content") or "")
            case {"role": "assistant", "content": content, **rest} if _is_message(rest):
                answer()["content"] = _text(index, content)
            case {"role": role, "content": content, **rest} if _is_message(rest):
                messages.append({"role": role, "content": _text(index, content)})
            case _:
                raise _wrong(f"input.{index}", item, f"it must be a {KINDS} of the API")
    return messages


def _is_message(rest: dict[str, Any]) -> bool:
    return rest.get("type", "message") == "message"


def _text(index: int, content: Any) -> str:
    """Return the text of a content, which is a text or a list of parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if None in texts:
        raise _wrong(f"input.{index}", content, "write text only")
    return "".join(map(str, texts))


def _tool(index: int, tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise _wrong(f"tools.{index}", tool, "only functions are tools")
    names = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _wrong(param: str, value: Any, rule: str) -> ApiError:
    message = f"{param} is {shown(value)}; {rule}"
    return ApiError(400, message, code="invalid_value", param=param)
