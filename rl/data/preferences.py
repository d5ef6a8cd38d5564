"""Rows of answers that are preferred to others, or labelled good or bad."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np

from rl.data.examples import (
    Encoder,
    EncodingConfig,
    Example,
    Examples,
    Masked,
    read_examples,
    repeats,
    weight_of,
)
from rl.data.jsonl import Row, Source
from rl.dialects.dialect import Dialect
from rl.errors import shown

PAIRS = '{"prompt": …, "chosen": …, "rejected": …} or {"chosen": […], "rejected": […]}'
SPEAKERS = {"Human": "user", "Assistant": "assistant"}
TURN = re.compile(r"\n\n(Human|Assistant):(.*?)(?=\n\n(?:Human|Assistant):|\Z)", re.DOTALL)
LABELLED = '{"prompt": …, "completion": …, "label": true or false}'


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pair:
    """Two answers to one prompt. Only tokens of the answers are trained."""

    chosen: Example
    rejected: Example
    prompt_tokens: int
    """Length of the prompt, with which both begin, in tokens."""
    margin: float | None = None
    """Target difference of the scores of a reward model, if the row has one."""

    @property
    def examples(self) -> tuple[Example, ...]:
        """Both answers."""
        return (self.chosen, self.rejected)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Labelled:
    """An answer and whether it is good. Only tokens of the answer are trained."""

    example: Example
    label: bool

    @property
    def examples(self) -> tuple[Example, ...]:
        """The answer."""
        return (self.example,)


def read_preferences(
    source: Source, dialect: Dialect, config: EncodingConfig, *, section: str = "data"
) -> Examples[Pair]:
    """Return the pairs of all rows of ``source``, in order.

    A row has ``chosen`` and ``rejected``, each one text or a list of messages that the assistant
    begins, and their ``prompt``, of the same kind. Without ``prompt``, both are whole conversations
    and their common first messages are the prompt; they may be texts of turns that begin with
    ``Human:`` and ``Assistant:``, each after an empty line. ``tools`` may be given with messages. A
    row is dropped if one of its answers is too long, or if a cut makes both equal. An answer ends
    with the last token that the assistant writes, at which a reward model scores it as it scores
    rollouts. ``margin`` is a number.

    ``section`` is the name of ``config`` in errors. Raises ConfigError that names the first row
    that cannot be used, or if none is left.
    """
    encoder = Encoder(dialect, config, section)

    def make(row: Row) -> Iterator[Pair | None]:
        _refuse_weight(row, weight_of(row, row.value))
        masked = []
        for tokens, factors in _both(row, encoder):
            trained = factors > 0
            _refuse_weight(row, *factors[trained])
            # the chat template may write after the last token to train
            end = len(tokens) - int(trained[::-1].argmax())
            masked.append((tokens[:end], trained[:end]))
        prompt = _common_prompt(row, *masked)
        chosen, rejected = (encoder.example(row, answer) for answer in masked)
        if chosen is None or rejected is None or np.array_equal(chosen.tokens, rejected.tokens):
            yield None
        else:
            margin = row.value.get("margin")
            is_number = isinstance(margin, int | float) and math.isfinite(margin)
            if margin is not None and (not is_number or isinstance(margin, bool)):
                raise row.error(f"field 'margin' is {shown(margin)}; write a number")
            margin = None if margin is None else float(margin)
            yield Pair(chosen=chosen, rejected=rejected, prompt_tokens=prompt, margin=margin)

    return read_examples(source, encoder, PAIRS, make)


def read_labelled(
    source: Source, dialect: Dialect, config: EncodingConfig, *, section: str = "data"
) -> Examples[Labelled]:
    """Return the labelled answers of all rows of ``source``, in order.

    A row has ``prompt`` and ``completion``, both text or both messages, and ``label``: true for a
    good answer, false for a bad one. ``section`` and errors are as in :func:`read_preferences`.
    """
    encoder = Encoder(dialect, config, section)

    def make(row: Row) -> Iterator[Labelled | None]:
        prompt, completion = _fields(row, LABELLED, "prompt", "completion")
        _refuse_weight(row, weight_of(row, row.value))
        label = row.value.get("label")
        if not isinstance(label, bool):
            raise row.error(f"field 'label' is {shown(label)}; write true or false")
        masked = encoder.completion(row, prompt, completion, "completion")
        _refuse_weight(row, *masked[1][masked[1] > 0])
        example = encoder.example(row, masked)
        yield None if example is None else Labelled(example=example, label=label)

    return read_examples(source, encoder, LABELLED, make)


def _both(row: Row, encoder: Encoder) -> tuple[Masked, Masked]:
    """Return tokens and masks of the two answers with their prompt."""
    chosen, rejected = _fields(row, PAIRS, "chosen", "rejected")
    if chosen == rejected:
        raise row.error("fields 'chosen' and 'rejected' are equal; remove the row")
    prompt = row.value.get("prompt")
    if prompt is None:
        chosen, rejected = (  # texts of conversations, as Anthropic's HH-RLHF has them
            [{"role": SPEAKERS[who], "content": said.strip()} for who, said in TURN.findall(side)]
            if isinstance(side, str) and TURN.match(side)
            else side
            for side in (chosen, rejected)
        )
    repeated = isinstance(prompt, str) and repeats(prompt, chosen) and repeats(prompt, rejected)
    if prompt is None or repeated:
        for name, value in (("chosen", chosen), ("rejected", rejected)):
            if not isinstance(value, list | tuple):
                what = f"field {name!r} is {shown(value)}, without a 'prompt'"
                raise row.error(f"{what}; write {PAIRS}")
        both = zip(chosen, rejected, strict=False)
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
        prompt, chosen, rejected = chosen[:common], chosen[common:], rejected[common:]
    return (
        encoder.completion(row, prompt, chosen, "chosen"),
        encoder.completion(row, prompt, rejected, "rejected"),
    )


def _refuse_weight(row: Row, *weights: float) -> None:
    """Raise ConfigError unless each factor of a loss is 1. A loss of sequences has none."""
    if any(weight != 1 for weight in weights):
        raise row.error(
            "a loss of preferences has no weights of rows, and those of messages are 0 or 1; "
            "remove the row or the weight"
        )


def _common_prompt(row: Row, chosen: Masked, rejected: Masked) -> int:
    """Return the length of the prompt, which must be the same tokens in both."""
    one, other = (tokens[: int(trained.argmax())] for tokens, trained in (chosen, rejected))
    if not np.array_equal(one, other):
        raise row.error(
            "the chat template writes the prompt otherwise before 'chosen' than before 'rejected'; "
            "end both answers before a next message of the user, and let both have thinking or none"
        )
    return len(one)


def _fields(row: Row, form: str, *names: str) -> list[Any]:
    values = [row.value.get(name) for name in names]
    for name, value in zip(names, values, strict=True):
        if value is None:
            raise row.error(f"field {name!r} is missing", fix=f"write {form}; {row.columns}")
    return values
