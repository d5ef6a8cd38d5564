"""Qwen3's dialect, which equals its chat template token for token."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from rl.dialects.answers import parse_answer
from rl.dialects.dialect import (
    AssistantTurn,
    ConversationError,
    Dialect,
    Markup,
    Messages,
    Rendered,
    Tokens,
    as_json,
    checked_messages,
    checked_tools,
    outside_messages,
)
from rl.dialects.plain_text import Pieces, PlainText
from rl.errors import require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BEFORE_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
AFTER_TOOLS = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    "within "
)
WORDS = (
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>"),
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
)
DISGUISED = re.compile("(?=<tool_response>).*</tool_response>", re.DOTALL)
"""Output of a tool in a message of the user."""
CALL_FORM = '\n{"name": <function-name>, "arguments": <args-json-object>}\n'


class Control(NamedTuple):
    """Ids of the control tokens, in the order of WORDS."""

    im_start: int
    im_end: int
    endoftext: int
    think: int
    think_end: int
    tool_call: int
    tool_call_end: int
    tool_response: int
    tool_response_end: int

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerFast") -> Self:
        """Return the ids of ``tokenizer``. Raises ConfigError if it lacks one."""
        known = tokenizer.get_added_vocab()
        for word in WORDS:
            problem = (
                f"the tokenizer in {tokenizer.name_or_path!r} has no control token {word!r}, which "
                "Qwen3's chat template needs"
            )
            require(word in known, problem, field="model.hf_path")
        return cls(*(known[word] for word in WORDS))

    @property
    def markup(self) -> Markup:
        """Control tokens between the parts of an answer."""
        return Markup(self.stops, self.think, self.think_end, self.tool_call, self.tool_call_end)

    @property
    def stops(self) -> tuple[int, int]:
        """Tokens that end an answer."""
        return self.im_end, self.endoftext


class Qwen3Dialect(Dialect):
    """Dialect of Qwen3, with or without experts.

    Its tokens are those of the chat template of ``tokenizer``, except in three cases:

    - Control tokens that are written in a message or a tool are encoded as plain text.
    - Text is cut before it is encoded at the end of the generation prompt, since the assistant
      begins to sample there. The cut changes only answers that begin with white space.
    - Input that the template would drop, such as a message of an unknown role, raises
      ConversationError.

    Thinking follows the template: it is kept after the last message of the user, also where it is
    written as ``<think>…</think>`` in the content, and left out before that message.

    ``thinks`` False is for the later instruction models. Their template has no thinking. Raises
    ConfigError if ``tokenizer`` lacks a control token.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", *, thinks: bool = True):
        self.tokenizer = tokenizer
        self.thinks = thinks
        self._control = Control.of(tokenizer)
        self._plain = PlainText(tokenizer)
        self.stop_token_ids: tuple[int, ...] = self._control.stops
        self.markup = self._control.markup

    def render(
        self,
        messages: Messages,
        tools: Messages | None = None,
        *,
        add_generation_prompt: bool = False,
        enable_thinking: bool = True,
    ) -> Rendered:
        """Return the tokens of a whole conversation.

        If ``enable_thinking`` is False, the generation prompt holds an empty thought. Therefore
        the empty thought of the last answer is not sampled. Raises ConversationError, naming the
        message.
        """
        turns = checked_messages(messages)
        out = Pieces()
        self._system(out, turns[0], checked_tools(tools))
        asked = [
            index
            for index, turn in enumerate(turns)
            if turn["role"] == "user" and not DISGUISED.fullmatch(turn["content"])
        ]
        query = asked[-1] if asked else len(turns) - 1
        for index, turn in enumerate(turns):
            role = turn["role"]
            if role == "assistant":
                last = index + 1 == len(turns)
                self._assistant(out, index, turn, index > query, last, enable_thinking)
            elif index or role != "system":
                self._outside(out, index, turns)
        if add_generation_prompt:
            self._generation_prompt(out, enable_thinking)
        return out.encoded(self._plain)

    def parse(self, prompt: Tokens, answer: Tokens) -> AssistantTurn:
        """Return the parts of an ``answer``, told apart by control tokens, never by text that looks
        like them.
        """
        return parse_answer(answer, self.markup, self.tokenizer)

    def continuation(
        self, prompt: Tokens, answer: Tokens, messages: Messages, *, enable_thinking: bool = True
    ) -> list[int]:
        """Return the tokens that follow ``prompt`` and ``answer``, up to the next answer.

        Thinking stays where it was sampled, unlike in :meth:`render`, which leaves out the thinking
        of earlier turns. Raises ConversationError, naming the message.
        """
        control = self._control
        turns = outside_messages(messages)
        out = Pieces()
        if not answer or answer[-1] not in control.stops:
            if self.parse(prompt, answer).is_reasoning_open:
                out.add(-1, False, control.think_end)
            out.add(-1, False, control.im_end)
        out.add(-1, False, "\n")
        for index in range(len(turns)):
            self._outside(out, index, turns)
        self._generation_prompt(out, enable_thinking)
        return out.encoded(self._plain).tokens.tolist()

    def call_begin(self, name: str | None, *, enable_thinking: bool = True) -> list[int]:
        """Return the tokens with which an answer begins a call of tool ``name``, or with None of
        any tool. They hold an empty thought.
        """
        control = self._control
        out = Pieces()
        if self.thinks and enable_thinking:
            out.add(-1, False, control.think, "\n\n", control.think_end, "\n\n")
        rest = '"' if name is None else f'{as_json("a tool", name)}, "arguments":'
        out.add(-1, False, control.tool_call, f'\n{{"name": {rest}')
        return out.encoded(self._plain).tokens.tolist()

    def encode(self, text: str) -> list[int]:
        """Return the tokens of ``text`` outside of any template, none of them a control token."""
        return self._plain.encode([text])[0]

    def _system(self, out: "Pieces", first: Mapping[str, Any], tools: list) -> None:
        control = self._control
        has_system = first["role"] == "system"
        index = 0 if has_system else -1
        text = first["content"] if has_system else ""
        if not tools:
            if has_system:
                out.add(0, False, control.im_start, f"system\n{text}", control.im_end, "\n")
            return
        listed = "".join("\n" + as_json("a tool", tool) for tool in tools)
        text = f"system\n{text}\n\n" if has_system else "system\n"
        out.add(index, False, control.im_start, text + BEFORE_TOOLS + listed + AFTER_TOOLS)
        out.add(index, False, control.tool_call, control.tool_call_end, " XML tags:\n")
        out.add(
            index, False, control.tool_call, CALL_FORM, control.tool_call_end, control.im_end, "\n"
        )

    def _assistant(
        self,
        out: "Pieces",
        index: int,
        turn: Mapping[str, Any],
        after_query: bool,
        last: bool,
        enable_thinking: bool,
    ) -> None:
        control = self._control
        out.add(index, False, control.im_start, "assistant\n")
        thought, content = self._thought(index, turn)
        text = content
        if self.thinks and after_query and (last or thought):
            thought = thought.strip("\n")
            sampled = enable_thinking or bool(thought)
            out.add(index, sampled, control.think, f"\n{thought}\n", control.think_end, "\n\n")
            text = content.lstrip("\n")
        out.add(index, True, text)
        for number, call in enumerate(turn["tool_calls"]):
            function = call["function"]
            arguments = function["arguments"]
            written = arguments
            if not isinstance(arguments, str):
                written = as_json(f"message {index}", arguments)
            body = f'\n{{"name": "{function["name"]}", "arguments": {written}}}\n'
            between = "\n" if number or content else ""
            out.add(index, True, between, control.tool_call, body, control.tool_call_end)
        out.add(index, True, control.im_end)
        out.add(index, False, "\n")

    def _thought(self, index: int, turn: Mapping[str, Any]) -> tuple[str, str]:
        """Return thinking and content, taken apart by the template's rule if they are one text."""
        thought = turn["reasoning_content"]
        content = turn["content"]
        if not self.thinks and (thought or re.search("<think>.*</think>", content, re.DOTALL)):
            raise ConversationError(
                f"message {index}: the chat template has no place for reasoning_content or "
                "<think> text; remove it"
            )
        if thought is None and self.thinks and "</think>" in content:
            before, *_, content = content.split("</think>")
            thought = before.rstrip("\n").split("<think>")[-1].lstrip("\n")
            content = content.lstrip("\n")
        return thought or "", content

    def _generation_prompt(self, out: "Pieces", enable_thinking: bool) -> None:
        control = self._control
        out.add(-1, False, control.im_start, "assistant\n")
        if self.thinks and not enable_thinking:
            out.add(-1, False, control.think, "\n\n", control.think_end, "\n\n")

    def _outside(self, out: "Pieces", index: int, turns: Sequence[Mapping[str, Any]]) -> None:
        """Add a message that no assistant wrote; neighbouring outputs of tools share a turn of the
        user.
        """
        control = self._control
        role = turns[index]["role"]
        if role != "tool":
            text = f"{role}\n{turns[index]['content']}"
            out.add(index, False, control.im_start, text, control.im_end, "\n")
            return
        if index == 0 or turns[index - 1]["role"] != "tool":
            out.add(index, False, control.im_start, "user")
        text = f"\n{turns[index]['content']}\n"
        out.add(index, False, "\n", control.tool_response, text, control.tool_response_end)
        if index + 1 == len(turns) or turns[index + 1]["role"] != "tool":
            out.add(index, False, control.im_end, "\n")
