"""Dialect of a chat template that writes each turn after what stands before it."""

import json
import re
from collections.abc import Mapping, Sequence
from copy import copy
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rl.dialects import dialect, template
from rl.dialects.answers import parse_answer
from rl.dialects.dialect import AssistantTurn, ConversationError, Messages, Rendered, Tokens
from rl.dialects.plain_text import ControlTokens, Pieces, PlainText
from rl.errors import shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPLIT = "\ufdd0"
"""Character, of no text, around each character of a control token that is written in a text."""
END = "\ufdd1"
"""Character, of no text, around the number of a message at the end of its text."""
LABEL = re.compile(f"{END}(\\d+){END}")
MARKS = re.compile(f"{SPLIT}|{LABEL.pattern}")

ASKED = template.said("user", "Hello?")
ANSWER = template.said("assistant", "Hi.")
ARGUMENTS = {"word": "né"}

Segment = tuple[str, bool, int]
"""Marked text, whether it is sampled, and the message that the text after its labels belongs to."""


class TemplateDialect(dialect.Dialect):
    """Dialect that the chat template of ``tokenizer`` gives, such as Llama 3's, Mistral's and
    Qwen2.5's.

    The template writes the messages before the first answer. It writes each part after them, an
    answer or the messages between two answers, in a short conversation. The whole must be what the
    template makes of the conversation. If an answer is last, it is enough that the whole before it
    is the prompt of that answer. The tokens are those of the template's text, except in two cases:

    - Control tokens that are written in a message or a tool are encoded as plain text.
    - Text is cut before it is encoded where the assistant begins to sample.

    The tokens of a list of tools belong to the message after them. A call without an id gets a
    number.

    ConversationError is raised if the template changes an answer once a message follows, or if the
    tokenizer does not encode the text between two control tokens by itself.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast"):
        self.tokenizer = tokenizer
        self.stop_token_ids = template.stop_tokens(tokenizer)
        if not template.template_stops(tokenizer):
            raise ConversationError("it writes no control token after an answer")
        self._outside = PlainText(tokenizer)
        self._within = PlainText(tokenizer, within=True)
        self._control = ControlTokens(tokenizer)
        self._ids = tokenizer.get_added_vocab()
        think, think_end = (self._ids.get(word, -1) for word in ("<think>", "</think>"))
        self.markup = dialect.Markup(self.stop_token_ids, think, think_end)
        self._set_options({})
        self._unread = ""
        self.render([ASKED, ANSWER, ASKED, ANSWER])
        self._unread = self._find_calls()

    def _set_options(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._begin = cache(lambda thinking: self._text([], True, thinking, after=[ASKED]))

    def with_options(self, options: Mapping[str, Any]) -> "TemplateDialect":
        """Return the dialect of the chat template with ``options``, its arguments by name."""
        other = copy(self)
        other._set_options(options)
        return other

    def render(
        self,
        messages: Messages,
        tools: Messages | None = None,
        *,
        add_generation_prompt: bool = False,
        enable_thinking: bool = True,
    ) -> Rendered:
        """Return the tokens of a whole conversation. Raises ConversationError."""
        on = enable_thinking
        turns = self._turns(dialect.checked_messages(messages))
        listed = dialect.checked_tools(tools) or None
        last = len(turns)
        answers = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
        if self._unread and (listed or any("tool_calls" in turn for turn in turns)):
            raise ConversationError(self._unread)
        if answers[:1] == [0]:
            raise ConversationError("message 0: it is the assistant's; write the user's before it")
        opening = turns[: answers[0]] if answers else turns
        prompt = bool(answers) or add_generation_prompt
        text = self._text(opening, prompt, on, listed)
        if listed and text == self._text(opening, prompt, on):
            raise ConversationError("the chat template has no place for tools")
        segments: list[Segment] = [(text, False, -1 if prompt else last - 1)]
        for index, end in pairwise([*answers, last]):
            prompt = end < last or add_generation_prompt
            segments.append((self._answer(turns[index], on, index), True, index))
            text = self._between(turns[index + 1 : end], prompt, on, index + 1)
            segments.append((text, False, -1 if prompt else end - 1))
        rendered = self._encoded(segments)
        self._require_exact(turns, listed, [text for text, *_ in segments], prompt, on)
        return rendered

    def parse(self, prompt: Tokens, answer: Tokens) -> AssistantTurn:
        """Return the parts of an ``answer``, told apart by control tokens. If the template writes
        calls without any, an answer that is one JSON object with name and arguments is a call.
        """
        return parse_answer(answer, self.markup, self.tokenizer)

    def continuation(
        self, prompt: Tokens, answer: Tokens, messages: Messages, *, enable_thinking: bool = True
    ) -> list[int]:
        """Return the tokens that follow ``prompt`` and ``answer``, up to the next answer.

        What the template would move once a message follows, such as Mistral's tools, stays where it
        was. Outputs of tools answer the calls of ``answer`` in their order.
        """
        turn = self.parse(prompt, answer)
        turns = self._turns(dialect.outside_messages(messages), turn)
        text = self._between(turns, True, enable_thinking)
        more = self._encoded([(text, False, -1)]).tokens.tolist()
        if answer and answer[-1] in self.stop_token_ids:
            return more
        return [self.markup.think_end] * turn.is_reasoning_open + [self.stop_token_ids[0], *more]

    def encode(self, text: str) -> list[int]:
        """Return the tokens of ``text`` outside of any template, none of them a control token."""
        return self._outside.encode([text])[0]

    def _turns(self, checked: list[Any], answer: AssistantTurn | None = None) -> list[Any]:
        """Return messages as templates read them: without empty keys, with arguments as objects,
        and with ids of calls. ``answer`` is the one before them.
        """
        turns = list[dict[str, Any]]()
        waiting = [call.id for call in answer.tool_calls] if answer else []
        for message in checked:
            turn = {key: value for key, value in message.items() if value not in (None, [])}
            for place, tool_call in enumerate(turn.get("tool_calls", ())):
                function = tool_call["function"]
                if isinstance(function["arguments"], str):
                    function["arguments"] = json.loads(function["arguments"])
                waiting.append(tool_call.setdefault("id", f"{len(turns):05}{place:04}"))
            if turn["role"] == "tool":
                known = waiting.pop(0) if waiting else ""
                call_id = "" if answer else turn.get("tool_call_id")
                turn["tool_call_id"] = call_id or known or f"{len(turns):09}"
            turns.append(turn)
        return turns

    def _text(
        self,
        turns: Any,
        prompt: bool,
        thinking: bool,
        tools: Any = None,
        after: Any = (),
        first: int = 0,
    ) -> str:
        """Return what the template writes for ``turns`` after other messages, with marks.

        ``first`` is the number of the first turn. Raises ConversationError if the template fails,
        leaves a text out, or acts on a control token in a text.
        """
        named = {"add_generation_prompt": prompt, "enable_thinking": thinking}
        options = {**self._options, **named}
        text = template.template_text(self.tokenizer, [*after, *turns], tools, **options)
        marked = self._spaced(turns)
        labels = list[str]()
        for index, turn in enumerate(marked, first):
            for key in ("content", "reasoning_content"):
                if body := turn.get(key, "").rstrip():
                    labels.append(f"{END}{index}{END}")
                    turn[key] = body + labels[-1] + turn[key][len(body) :]
        spaced = self._spaced(tools)
        whole = template.template_text(self.tokenizer, [*after, *marked], spaced, **options)
        if MARKS.sub("", whole) != text:
            problem = "the chat template acts on a control token that is written in a text"
            raise ConversationError(f"{problem}; remove it")
        for label in labels:
            if whole.count(label) < labels.count(label):
                problem = "the chat template leaves out a part of it; remove that part"
                raise ConversationError(f"message {label.strip(END)}: {problem}")
        return whole

    def _spaced(self, value: Any) -> Any:
        """Return ``value`` with SPLIT around each character of the control tokens in its texts."""
        if isinstance(value, Mapping):
            return {self._spaced(key): self._spaced(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [*map(self._spaced, value)]
        while isinstance(value, str) and (word := self._control.first_in(value)):
            if len(word) == 1:
                raise ConversationError(f"a text has {word!r}, which is a control token; remove it")
            value = value.replace(word, SPLIT.join(["", *word, ""]))
        return value

    def _answer(self, turn: Any, thinking: bool, number: int = 0) -> str:
        """Return what the assistant samples for ``turn``, with the stop token, marked."""
        whole = self._text([turn], False, thinking, after=[ASKED], first=number)
        answer = _rest(
            self._begin(thinking), whole, "it begins an answer otherwise than a prompt ends"
        )
        stop = self.tokenizer.convert_ids_to_tokens(self.stop_token_ids[0])
        return answer.rpartition(stop)[0] + stop

    def _between(self, turns: list[Any], prompt: bool, thinking: bool, first: int = 0) -> str:
        """Return what the template writes after an answer for ``turns`` of others, marked."""
        head = self._begin(thinking) + MARKS.sub("", self._answer(ANSWER, thinking))
        whole = self._text(turns, prompt, thinking, after=[ASKED, ANSWER], first=first)
        return _rest(head, whole, "it changes an answer once a message follows")

    def _require_exact(
        self, turns: list[Any], tools: Any, marked: list[str], prompt: bool, thinking: bool
    ) -> None:
        """Raise ConversationError unless the template writes ``turns`` as ``marked``."""
        named = {"enable_thinking": thinking, "add_generation_prompt": prompt}
        options = {**self._options, **named}
        ours = MARKS.sub("", "".join(marked))
        theirs = template.template_text(self.tokenizer, turns, tools, **options)
        if turns[-1]["role"] == "assistant" and not prompt and ours != theirs:
            options["add_generation_prompt"] = True
            ours = MARKS.sub("", "".join(marked[:-2]))
            theirs = template.template_text(self.tokenizer, turns[:-1], tools, **options)
        if reason := template.text_difference(ours, theirs):
            raise ConversationError(f"the chat template changes earlier turns: {reason}")
        tokens = self._encoded([(theirs, False, 0)]).tokens.tolist()
        is_plain = SPLIT not in "".join(marked)
        if is_plain and tokens != self.tokenizer.encode(theirs, add_special_tokens=False):
            raise ConversationError("the tokenizer joins a control token with the text beside it")

    def _encoded(self, segments: Sequence[Segment]) -> Rendered:
        out = Pieces()
        for text, sampled, owner in segments:
            parts = self._control.split(text)
            pieces = list[tuple[int, bool, int | str]]()
            for place in reversed(range(len(parts))):
                is_control = place % 2
                labels = LABEL.findall(parts[place - is_control])  # a control token ends a text
                whose = int(labels[-1]) if labels else owner
                owner = owner if is_control else whose
                part = self._ids[parts[place]] if is_control else MARKS.sub("", parts[place])
                pieces.append((whose, sampled, part))
            for piece in reversed(pieces):
                out.add(*piece)
        return out.encoded(self._within)

    def _find_calls(self) -> str:
        """Find how the template writes calls. Return the reason if they cannot be read."""
        call = template.call(**ARGUMENTS) | {"id": "000000000"}
        try:
            text = self._answer(template.said("assistant", "", tool_calls=[call]), True)
        except ConversationError as error:
            return f"tools cannot be used: {error}"
        if "look_up" not in text:
            return (
                "tools cannot be used: this chat template writes no tool calls; use a model whose "
                "template writes them, such as Qwen3, Qwen2.5, Llama 3.1 or Mistral"
            )
        words = self._control.split(text)[1:-2:2]
        begin, end, *_ = [*(words or ["<|python_tag|>"]), "", ""]
        markup = self.markup._replace(
            tool_call=self._ids.get(begin, -1),
            tool_call_end=self._ids.get(end, -1),
            arguments="parameters" if '"parameters"' in text else "arguments",
            is_bare=not words,
        )
        tokens = self._encoded([(text, True, 0)]).tokens.tolist()
        calls = parse_answer(tokens, markup, self.tokenizer).tool_calls
        if [(parsed.name, parsed.arguments) for parsed in calls] != [("look_up", ARGUMENTS)]:
            return f"tools cannot be used: a call that is written {shown(text)} cannot be read"
        self.markup = markup
        return ""


def _rest(begin: str, whole: str, problem: str) -> str:
    """Return ``whole`` without its ``begin``. Raises ConversationError with the difference."""
    if not whole.startswith(begin):
        raise ConversationError(
            f"{problem}: {template.text_difference(begin, MARKS.sub('', whole))}"
        )
    return whole[len(begin) :]
