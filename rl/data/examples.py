"""Examples of tokens, made of conversations or of plain text."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, Literal, Protocol, TypeVar, get_args

import numpy as np

from rl.data.jsonl import Row, Source, read_rows
from rl.data.sources import open_source
from rl.data.stored import kept
from rl.dialects.dialect import ConversationError, Dialect, usual_messages
from rl.dialects.plain_text import ControlTokens
from rl.errors import ConfigError, require, shown
from rl.types.rules import at_least

Truncate = Literal["error", "drop", "right"]
WrittenControl = Literal["refuse", "text", "parse"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Example:
    """Tokens to train on. Two arrays of one length T."""

    tokens: np.ndarray
    """int32 [T]."""
    trained: np.ndarray
    """bool [T]. Whether the token is trained. False for the first token, which nothing predicts.
    At least one is True."""
    line: int
    """Line of the file, from 1; of other sources, number of the row, from 0."""

    truncated: bool = False
    """Whether tokens were cut off at the end."""

    part: int = 0
    """Number of the example's set, of those that the source names."""

    weights: np.ndarray | None = None
    """float32 [T]. Factor of the loss of each token, above 0 if it is trained; None if all are
    1."""

    @property
    def examples(self) -> tuple["Example", ...]:
        """This example, as a pair has two."""
        return (self,)

    def __len__(self) -> int:
        return len(self.tokens)


class HasExamples(Protocol):
    """Item of a data set: an example, or several that are trained together."""

    @property
    def examples(self) -> tuple[Example, ...]:
        """The examples of the item."""
        ...


Item = TypeVar("Item", bound=HasExamples)


@dataclass(kw_only=True, slots=True)
class EncodingConfig:
    """Encoding of rows as tokens."""

    max_tokens: Annotated[int, at_least(2, 10**8)] = 2048
    """Maximum length of an example, in tokens; at most ``model.max_seq_len``."""

    truncate: Truncate = "error"
    """Treatment of longer examples.

    - ``error``: The data is refused, and the error names the line.
    - ``drop``: The example is left out and counted.
    - ``right``: Its last tokens are cut off, with the token that stops it. It is counted. An
      example that has nothing left to train on is left out and counted as such.
    """

    columns: dict[str, str] = field(default_factory=dict)
    """Names of columns by the fields that they hold, such as ``prompt`` from ``question``. Other
    fields have columns of their own names. An empty name leaves a column out, such as metadata
    that is called ``loss``."""

    enable_thinking: bool = True
    """Value of the chat template's switch of this name. False: prompts hold an empty thought."""

    control_tokens: WrittenControl = "refuse"
    """Treatment of control tokens that are written in a field of plain text (``text``, ``prompt``,
    ``completion``, ``chosen``, ``rejected``). In messages, they are plain text, except that
    ``<tool_call>`` and ``<tool_response>`` markup is parsed unless this is ``text``.

    - ``refuse``: The data is refused, and the error names the line.
    - ``text``: It is encoded as plain text.
    - ``parse``: It becomes the control token, for text that a chat template has made.
    """


@dataclass(frozen=True, slots=True)
class Examples(Generic[Item]):
    """Examples, pairs or labelled examples, in the order of their rows."""

    items: Sequence[Item]
    dropped: int
    """Number of items that were left out for their length."""
    truncated: int
    """Number of items from which tokens were cut off."""

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Item:
        return self.items[index]

    def __iter__(self) -> Iterator[Item]:
        return iter(self.items)


Masked = tuple[np.ndarray, np.ndarray]
"""Tokens, int32 [T], and the factor of the loss of each, float32 or bool [T]; 0 is not trained."""

SWITCHES = ("train", "trainable", "loss_mask", "loss")
"""Keys of messages and rows that say whether they are trained: true, false, 1 or 0."""

FIELDS = (
    *("messages", "prompt", "completion", "text", "tools", "chosen", "rejected"),
    *("label", "margin", "weight", "chat_template_kwargs"),
)
"""Fields of rows that the readers know."""

LOSS_KEY = re.compile(
    r"loss|train((ing|able)?([_-]?detail)?|ed)|"
    r"((loss|sample|example|token|message|turn|completion|assistant|label|train)s?[_-]?)?"
    r"(weight|mask)s?"
)
"""Keys by which trainers change the loss. Other names with these words are metadata."""


@dataclass(eq=False)
class Encoder:
    """Encoder of the parts of rows into tokens with a mask, by one dialect.

    All methods raise ConfigError, naming the row, if it cannot be encoded.
    """

    dialect: Dialect
    config: EncodingConfig
    section: str = "data"
    """Name of the config section, for errors."""
    every_token: bool = False
    """Whether all tokens are trained, not only those that the assistant writes."""

    def __post_init__(self) -> None:
        config, section = self.config, self.section
        check_choice(f"{section}.truncate", config.truncate, Truncate)
        check_choice(f"{section}.control_tokens", config.control_tokens, WrittenControl)
        for name in filter(config.columns.get, config.columns):
            check_choice(f"{section}.columns", name, FIELDS)
        tokenizer = self.dialect.tokenizer
        self._control = ControlTokens(tokenizer)
        bos = tokenizer.bos_token_id
        begins = tokenizer.encode("")[:1]
        self._begin: list[int] = begins if bos is not None and begins == [bos] else []

    def messages(self, row: Row, value: Any, origin: str) -> list[Any]:
        """Return the messages of field ``value`` in the form that dialects read.

        ``origin`` names the field, for errors.
        """
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise row.error(f"{origin} is {shown(value)}; write a list of messages")
        try:
            return usual_messages(value, parse=self.config.control_tokens != "text")
        except ConversationError as error:
            raise row.error(
                f"{origin}: {error}, or set {self.section}.control_tokens to 'text'"
            ) from None

    def conversation(
        self, row: Row, messages: Sequence[Any], origin: str, prompt: int = 0
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return tokens, factors of the loss and message indices of a conversation.

        Trained is what the assistant samples from message number ``prompt`` on, times the weights
        of the messages. ``origin`` names the fields, for errors.
        """
        options = template_options(row)
        thinking = options.pop("enable_thinking", self.config.enable_thinking)
        try:
            dialect = self.dialect.with_options(options) if options else self.dialect
            done = dialect.render(messages, row.json("tools"), enable_thinking=thinking)
        except ConversationError as error:
            raise row.error(f"{origin}: {error}") from None
        weights = [self._weight_of(row, *indexed) for indexed in enumerate(messages)]
        factors = np.array([*weights, 1.0], dtype=np.float32)[done.message]  # -1 is the last
        if not self.every_token:
            factors = np.where(done.sampled & (done.message >= prompt), factors, 0)
        return done.tokens, factors, done.message

    def _weight_of(self, row: Row, index: int, message: Mapping[str, Any]) -> float:
        if message["role"] != "assistant" and not self.every_token:
            asked = [key for key in SWITCHES if message.get(key) not in (None, 0)]
            if asked:
                raise row.error(
                    f"message {index}: {asked[0]!r} is {shown(message[asked[0]])}, but only the "
                    "assistant's messages are trained; remove the key"
                )
        return weight_of(row, message, f"message {index}: ")

    def completion(self, row: Row, prompt: Any, completion: Any, name: str) -> Masked:
        """Return the tokens of prompt and completion, of which the completion is trained.

        Both are plain text or both are messages; text also completes messages, as the assistant's.
        """
        if isinstance(prompt, str) and isinstance(completion, str):
            before = self._with_begin(self.text(row, "prompt", empty=True))
            answer = self._stopped(self.text(row, name, empty=True))
            tokens = np.array([*before, *answer], dtype=np.int32)
            return tokens, np.arange(len(tokens)) >= (0 if self.every_token else len(before))
        if isinstance(prompt, str) or not isinstance(prompt, Sequence):
            raise row.error(
                f"field 'prompt' is {shown(prompt)} and field {name!r} {shown(completion)}; write "
                f"both as text or both as messages; without 'prompt' if {name!r} holds it too"
            )
        if isinstance(completion, str):
            completion = [{"role": "assistant", "content": completion}]
        first = completion[0] if isinstance(completion, Sequence) and completion else None
        if not isinstance(first, Mapping) or first.get("role") != "assistant":
            raise row.error(
                f"field {name!r} is {shown(completion)}; write the assistant's text, or messages "
                "of which the first is the assistant's"
            )
        before = self.messages(row, prompt, "field 'prompt'")
        whole = [*before, *self.messages(row, completion, f"field {name!r}")]
        origin = f"fields 'prompt' and {name!r}"
        return self.conversation(row, whole, origin, prompt=len(before))[:2]

    def whole_text(self, row: Row) -> Masked:
        """Return the tokens of field ``text`` and the stop token, all of them trained."""
        tokens = np.array(self._with_begin(self._stopped(self.text(row, "text"))), dtype=np.int32)
        return tokens, np.ones(len(tokens), dtype=np.bool_)

    def text(self, row: Row, name: str, *, empty: bool = False) -> list[int]:
        """Return the tokens of a field of plain text."""
        text = row.text(name, empty=empty)
        if self.config.control_tokens == "parse":
            return list(self.dialect.tokenizer.encode(text, add_special_tokens=False))
        word = self._control.first_in(text)
        if word and self.config.control_tokens == "refuse":
            raise row.error(
                f"field {name!r} has the control token {word!r}; set {self.section}.control_tokens "
                "to 'parse' if a chat template has made this text, else to 'text'"
            )
        try:
            return self.dialect.encode(text)
        except ConversationError as error:
            raise row.error(f"field {name!r}: {error}") from None

    def example(self, row: Row, masked: Masked) -> Example | None:
        """Return the example of a row, cut to the maximum length; None if it is dropped."""
        tokens, factors = masked
        limit = self.config.max_tokens
        trained = (factors > 0) & (np.arange(len(tokens)) > 0)
        if not trained.any():
            raise row.error("nothing in it is to be trained: no token of an assistant; remove it")
        if len(tokens) > limit:
            setting = f"{self.section}.max_tokens={limit}"
            if self.config.truncate == "error":
                raise row.error(
                    f"it has {len(tokens)} tokens, more than {setting} allows; raise the limit or "
                    f"set {self.section}.truncate to 'drop' or 'right'"
                )
            if self.config.truncate == "drop" or not trained[:limit].any():
                return None
        return Example(
            tokens=tokens[:limit],
            trained=trained[:limit],
            line=row.line,
            part=row.part,
            truncated=len(tokens) > limit,
            weights=None if (factors[trained] == 1).all() else factors[:limit],
        )

    def _with_begin(self, tokens: list[int]) -> list[int]:
        """Return ``tokens`` after the token that begins a plain text, if the tokenizer has one."""
        return tokens if tokens[:1] == self._begin else [*self._begin, *tokens]

    def _stopped(self, tokens: list[int]) -> list[int]:
        """Return ``tokens`` with the token that stops a plain text at their end."""
        stop = self.dialect.tokenizer.eos_token_id
        if stop is None:
            stop = self.dialect.stop_token_ids[0]
        ends = {stop, *self.dialect.stop_token_ids}
        return tokens if tokens and tokens[-1] in ends else [*tokens, stop]


def template_options(row: Row) -> dict[str, Any]:
    """Return the arguments of the chat template that a row has. Raises ConfigError."""
    options = row.json("chat_template_kwargs")
    if options is None:
        return {}
    if not isinstance(options, Mapping) or options.get("enable_thinking") not in (
        None,
        True,
        False,
    ):
        raise row.error(
            f"field 'chat_template_kwargs' is {shown(options)}; write an object, such as "
            '{"enable_thinking": false}'
        )
    return {name: value for name, value in options.items() if value is not None}


def weight_of(row: Row, value: Mapping[str, Any], where: str = "") -> float:
    """Return the factor of the loss that the keys of a row or of one of its messages ask for.

    ``weight`` is a number, and SWITCHES are true or false. Raises ConfigError for other values, and
    for other keys of LOSS_KEY.
    """
    factor = 1.0
    for key, content in value.items():
        if content is None or isinstance(content, str) or not LOSS_KEY.fullmatch(str(key).lower()):
            continue
        is_number = isinstance(content, int | float) and math.isfinite(content) and content >= 0
        if key == "weight":
            allowed = "a number of at least 0" if not is_number else ""
        elif key in SWITCHES:
            of_splits = ", or the rows of one split as lines" * isinstance(content, list)
            allowed = f"true or false{of_splits}" if content not in (0, 1) else ""
        else:
            allowed = f"'weight' (a number) or 'train' (true or false) in place of {key!r}"
        if allowed:
            left_out = f"or leave it out, as metadata: --{row.section}.columns {key} ''"
            problem = f"{where}{key!r} is {shown(content)}; write {allowed}"
            raise row.error(problem, fix="" if where else left_out)
        factor *= float(content)
    return factor


def repeats(prompt: Any, messages: Any) -> bool:
    """Whether ``prompt`` is the begin of ``messages``, or the text of one of them."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return False
    if not isinstance(prompt, str):
        return isinstance(prompt, list) and messages[: len(prompt)] == prompt
    return any(isinstance(turn, Mapping) and turn.get("content") == prompt for turn in messages)


def check_choice(field: str, value: str, allowed: Any) -> None:
    """Raise ConfigError, naming ``field``, unless ``value`` is one of ``allowed``."""
    choices = get_args(allowed) or allowed
    require(value in choices, f"{field}: {shown(value)} is not one of {', '.join(choices)}")


def read_examples(
    source: Source,
    encoder: Encoder,
    form: str,
    make: Callable[[Row], Iterable[Item | None]],
) -> Examples[Item]:
    """Return what ``make`` makes of the rows of ``source``.

    ``make`` yields items, and None for each that is dropped. ``form`` is an example of a row.
    Raises ConfigError if no item is left.
    """
    field = f"{encoder.section}.path"
    source = open_source(source, field)
    counts = Counter[str]()

    def made() -> Iterator[Item]:
        for row in read_rows(source, field=field, form=form):
            for item in make(row.renamed(encoder.config.columns)):
                counts["dropped"] += item is None
                if item is not None:
                    counts["truncated"] += any(example.truncated for example in item.examples)
                    yield item

    items = kept(made(), source)
    dropped = counts["dropped"]
    if not items:
        require(dropped > 0, f"{field}: each row has the weight 0; none is left")
        raise ConfigError(
            f"{encoder.section}.max_tokens: each of the {dropped} examples has more than "
            f"{encoder.config.max_tokens} tokens; raise it"
        )
    return Examples(items, dropped, counts["truncated"])
