"""Dialects of other model families than Qwen3, from the package renderers."""

from typing import TYPE_CHECKING, Any

import numpy as np
from renderers import config_from_name, create_renderer
from renderers.base import MODEL_RENDERER_MAP, ToolCallParseStatus

from rl.dialects.dialect import (
    AssistantTurn,
    ConversationError,
    Dialect,
    Messages,
    Rendered,
    Tokens,
    ToolCall,
    as_json,
    checked_messages,
    checked_tools,
)
from rl.dialects.plain_text import ControlTokens
from rl.dialects.template import (
    PLAIN,
    PROBES,
    SEVERAL,
    Probe,
    difference,
    template_text,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class FamilyDialect(Dialect):
    """Dialect of one of the families that the package renderers has, such as ``"llama-3"``.

    Each conversation is compared with the chat template of ``tokenizer``. ConversationError is
    raised if they differ, or if a message contains a control token, which renderers cannot encode
    as plain text.

    Some templates write the token that stops an answer only before the next message. The last
    answer of a conversation gets this token too.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", family: str):
        self.tokenizer = tokenizer
        self.family = family
        self._control = ControlTokens(tokenizer)
        self._renderers: dict[tuple[bool, bool], Any] = {}
        self._config = config_from_name(family)
        self._has_switch = "enable_thinking" in type(self._config).template_field_names()
        self.stop_token_ids = tuple(self._renderer(True).get_stop_token_ids())
        several = self._render(SEVERAL, None, False, True)
        self._closing = several.tokens[several.sampled & (several.message < len(SEVERAL) - 1)][-1]

    def render(
        self,
        messages: Messages,
        tools: Messages | None = None,
        *,
        add_generation_prompt: bool = False,
        enable_thinking: bool = True,
    ) -> Rendered:
        """Return the tokens of a whole conversation. Raises ConversationError."""
        turns = [
            {key: value for key, value in turn.items() if value is not None}
            for turn in checked_messages(messages)
        ]
        listed = checked_tools(tools) or None
        for index, turn in enumerate(turns):
            self._control.refuse_in(as_json(f"message {index}", turn), f"message {index}")
        self._control.refuse_in(as_json("tools", listed), "tools")
        rendered = self._render(turns, listed, add_generation_prompt, enable_thinking)
        options = {"add_generation_prompt": add_generation_prompt}
        if self._has_switch:
            options["enable_thinking"] = enable_thinking
        text = template_text(self.tokenizer, turns, listed, **options)
        if reason := difference(self.tokenizer, rendered.tokens, text):
            raise ConversationError(
                f"{self.family} of renderers differs from the chat template: {reason}"
            )
        if add_generation_prompt or turns[-1]["role"] != "assistant":
            return rendered
        return self._stopped(rendered)

    def parse(self, prompt: Tokens, answer: Tokens) -> AssistantTurn:
        """Return the parts of an ``answer`` that was sampled after ``prompt``."""
        parsed = self._renderer(True).parse_response([*answer], prompt_ids=[*prompt])
        return AssistantTurn(
            content=parsed.content or "",
            reasoning=parsed.reasoning_content or "",
            tool_calls=tuple(map(_call, parsed.tool_calls or ())),
        )

    def continuation(
        self, prompt: Tokens, answer: Tokens, messages: Messages, *, enable_thinking: bool = True
    ) -> list[int]:
        """Return the tokens that follow ``prompt`` and ``answer``, up to the next answer.

        Thinking stays where it was sampled. Raises ConversationError if a token before would have
        to change.
        """
        turns = checked_messages(messages)
        for index, turn in enumerate(turns):
            self._control.refuse_in(as_json(f"message {index}", turn), f"message {index}")
        before = [*prompt, *answer]
        renderer = self._renderer(enable_thinking, keeps_thinking=True)
        whole = renderer.bridge_to_next_turn([*prompt], [*answer], turns)
        if whole is None or whole.token_ids[: len(before)] != before:
            raise ConversationError(
                f"{self.family} of renderers would change earlier tokens of this conversation"
            )
        return list(whole.token_ids[len(before) :])

    def encode(self, text: str) -> list[int]:
        """Return the tokens of ``text`` outside of any template. Raises ConversationError."""
        self._control.refuse_in(text, "text")
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _render(
        self, turns: list, tools: list | None, add_generation_prompt: bool, enable_thinking: bool
    ) -> Rendered:
        renderer = self._renderer(enable_thinking)
        try:
            done = renderer.render(turns, tools=tools, add_generation_prompt=add_generation_prompt)
        except ValueError as error:
            raise ConversationError(f"{self.family} cannot render it: {error}") from None
        if len(done.sampled_mask) != len(done.token_ids):
            raise ConversationError(f"{self.family} does not tell which tokens are sampled")
        return Rendered(
            tokens=np.array(done.token_ids, dtype=np.int32),
            sampled=np.array(done.sampled_mask, dtype=np.bool_),
            message=np.array(done.message_indices, dtype=np.int32),
        )

    def _stopped(self, rendered: Rendered) -> Rendered:
        """Return ``rendered`` with the token that stops its last answer."""
        written = rendered.tokens[rendered.sampled]
        if len(written) and written[-1] in self.stop_token_ids:
            return rendered
        return Rendered(
            tokens=np.append(rendered.tokens, self._closing),
            sampled=np.append(rendered.sampled, True),
            message=np.append(rendered.message, rendered.message[-1]),
        )

    def _renderer(self, enable_thinking: bool, *, keeps_thinking: bool = False) -> Any:
        """Return a renderer; ``keeps_thinking``: whether earlier turns keep their thinking."""
        key = (enable_thinking, keeps_thinking)
        if key not in self._renderers:
            options: dict[str, Any] = {"thinking_retention": "all"} if keeps_thinking else {}
            if self._has_switch:
                options["enable_thinking"] = enable_thinking
            elif not enable_thinking:
                raise ConversationError(
                    f"enable_thinking is False, but {self.family} has no such switch; set it to "
                    "True"
                )
            config = self._config.model_copy(update=options)
            self._renderers[key] = create_renderer(self.tokenizer, config)
        return self._renderers[key]


def _call(call: Any) -> ToolCall:
    if call.status is ToolCallParseStatus.OK and isinstance(call.arguments, dict):
        return ToolCall(name=call.name, arguments=call.arguments)
    return ToolCall(name="", arguments={}, error=f"the tool call is malformed: {call.status.value}")


def find_family(tokenizer: "PreTrainedTokenizerFast") -> FamilyDialect | None:
    """Return the family that agrees with the chat template of ``tokenizer`` on most sample
    conversations. It must agree on the plain ones; None if no family does.
    """
    best = None
    most = 0
    for family in sorted(set(MODEL_RENDERER_MAP.values())):
        try:
            dialect = FamilyDialect(tokenizer, family)
        except Exception:  # made for another tokenizer: assertions, lookups, types
            continue
        exact = [_is_exact(dialect, probe) for probe in PROBES]
        if all(exact[:PLAIN]) and sum(exact) > most:
            best = dialect
            most = sum(exact)
    return best


def _is_exact(dialect: FamilyDialect, probe: Probe) -> bool:
    messages, tools = probe
    try:
        for add_generation_prompt in (False, True):
            dialect.render(messages, tools, add_generation_prompt=add_generation_prompt)
    except Exception:  # also failures within a renderer that was made for another tokenizer
        return False
    return True
