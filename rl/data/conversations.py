"""Rows of conversations, of prompts with completions or of texts, as examples."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from rl.data.examples import (
    Encoder,
    EncodingConfig,
    Example,
    Examples,
    Masked,
    check_choice,
    read_examples,
    repeats,
    weight_of,
)
from rl.data.jsonl import Row, Source
from rl.dialects.dialect import Dialect
from rl.errors import require

LossOn = Literal["assistant", "completion", "all"]
Turns = Literal["together", "apart"]
SHAREGPT = "conversations"
"""Column of ShareGPT's rows with the messages, beside ``system`` and ``tools``."""
FORM = '{"messages": […]}, {"prompt": …, "completion": …} or {"text": …}'


@dataclass(kw_only=True, slots=True)
class ConversationsConfig(EncodingConfig):
    """Encoding of rows for supervised fine-tuning."""

    loss_on: LossOn = "assistant"
    """Tokens that are trained. The token that stops a turn counts as part of it.

    - ``assistant``: All that the assistant writes in ``messages`` or in ``completion``.
    - ``completion``: The last message of ``messages``, which must be the assistant's, or all that
      the assistant writes in ``completion``.
    - ``all``: Every token, also of prompts and templates. Rows with ``text`` need it.
    """

    turns: Turns = "together"
    """Examples that a row with ``messages`` makes.

    - ``together``: One. Qwen3's chat template leaves out the thinking before the last message of
      the user, so it is not trained.
    - ``apart``: One for each message of the user that is answered. It ends before the next message
      of the user, and only the answers after the last one are trained. Thus all thinking is
      trained, each in the prompt that it is sampled in. ``loss_on`` must be ``assistant``.
    """


def read_conversations(
    source: Source,
    dialect: Dialect,
    config: ConversationsConfig,
    *,
    section: str = "data",
) -> Examples[Example]:
    """Return the examples of all rows of ``source``, in order.

    A row has one of three forms:

    - ``messages``, with ``tools`` if there are any: a conversation. A ``prompt`` beside it must
      repeat its first messages, or the text of one of them. ShareGPT's ``conversations``, with
      ``system``, is the same.
    - ``prompt`` and ``completion``: two texts, or two lists of messages. The completion may also be
      the text of the assistant's message.
    - ``text``: plain text outside of any template.

    A row or a message may have ``weight``, a factor of its loss, or ``train`` or ``loss_mask``.
    Each row makes one example, unless ``config.turns`` is ``apart``.

    ``section`` is the name of ``config`` in errors. Raises ConfigError that names the first row
    that cannot be used, or if none is left.
    """
    check_choice(f"{section}.loss_on", config.loss_on, LossOn)
    check_choice(f"{section}.turns", config.turns, Turns)
    apart = config.turns == "apart"
    require(
        config.loss_on == "assistant" or not apart,
        f"{section}.turns: 'apart' trains each answer once, but {section}.loss_on is "
        f"{config.loss_on!r}; set it to 'assistant'",
    )
    encoder = Encoder(dialect, config, section, every_token=config.loss_on == "all")

    def make(row: Row) -> Iterator[Example | None]:
        row = _without_sharegpt(row)
        several = apart and _kind(row.value) == "messages"
        if row.value.get("label") is False and _kind(row.value) != "text":
            raise row.error(
                "field 'label' is False: it calls the answer bad, and this trainer would imitate "
                "the answer; remove the row, or train on good and bad answers with KTOLoss"
            )
        weight = weight_of(row, row.value)
        for tokens, factors in (
            _by_turn(row, encoder) if several else [_masked(row, encoder, config)]
        ):
            if weight:
                yield encoder.example(row, (tokens, factors * np.float32(weight)))

    return read_examples(source, encoder, FORM, make)


def _without_sharegpt(row: Row) -> Row:
    """Return a row of ShareGPT's form with ``messages``; any other row as it is."""
    turns = row.value.get(SHAREGPT)
    if not isinstance(turns, list) or row.value.get("messages") is not None:
        return row
    value = {key: item for key, item in row.value.items() if key not in (SHAREGPT, "system")}
    if row.value.get("system"):
        turns = [{"role": "system", "content": row.value["system"]}, *turns]
    return replace(row, value=value | {"messages": turns})


def _masked(row: Row, encoder: Encoder, config: ConversationsConfig) -> Masked:
    kind = _kind(row.value)
    if kind == "text":
        if config.loss_on != "all":
            raise row.error(
                f"field 'text' has no assistant, but {encoder.section}.loss_on is "
                f"{config.loss_on!r}; set it to 'all'"
            )
        return encoder.whole_text(row)
    if kind == "messages":
        messages = encoder.messages(row, row.value["messages"], "field 'messages'")
        tokens, factors, message = encoder.conversation(row, messages, "field 'messages'")
        if config.loss_on == "completion":
            last = len(messages) - 1
            if messages[last]["role"] != "assistant":
                raise row.error("its last message is not the assistant's; there is no completion")
            factors = np.where(message == last, factors, 0)
        return tokens, factors
    if kind == "completion":
        return encoder.completion(row, row.value["prompt"], row.value["completion"], "completion")
    fields = ", ".join(map(repr, row.value)) or "nothing"
    fix = f"write {FORM}, or name their columns in {encoder.section}.columns"
    raise row.error(f"it has {fields}", fix=fix)


def _by_turn(row: Row, encoder: Encoder) -> Iterator[Masked]:
    """Yield one masked conversation for each turn of the user that is answered, up to the next
    turn of the user.
    """
    origin = "field 'messages'"
    messages = encoder.messages(row, row.value["messages"], origin)
    whole = encoder.conversation(row, messages, origin)  # raises if any message is wrong
    roles = [message["role"] for message in messages]
    ends = [i for i in range(1, len(roles)) if roles[i] == "user" and roles[i - 1] != "user"]
    answered = False
    for start, end in pairwise([0, *ends, len(roles)]):
        masked = encoder.conversation(row, messages[:end], origin, prompt=start)[:2]
        if masked[1].any():
            answered = True
            yield masked
    if not answered:
        yield whole[:2]  # has nothing to train


def _kind(value: Mapping) -> str:
    """Return the form of a row, empty if it has none or several."""
    present = {name for name in ("messages", "prompt", "completion", "text") if name in value}
    present = {name for name in present if value[name] is not None}
    if present == {"prompt", "completion"}:
        return "completion"
    if present == {"messages", "prompt"} and repeats(value["prompt"], value["messages"]):
        return "messages"
    return present.pop() if present in ({"messages"}, {"text"}) else ""
