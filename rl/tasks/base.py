"""The protocol between a run and what it trains on."""

import json
import operator
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, cast

from torchtitan.config import Configurable

from rl.errors import ConfigError, shown
from rl.model.shape import ModelConfig, shape_of
from rl.rules import at_least
from rl.types import Completion, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How good one completion is.

    Numbers are Python's or numpy's, finite in float32; a score that breaks a rule costs its group.
    """

    reward: float
    """Number that the policy learns from."""

    correct: bool
    """Whether the completion is right, which evaluation counts; Python's or numpy's bool."""

    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers averaged over the rollouts of a step and reported as ``reward/NAME``. The names
    ``correct``, ``mean`` and ``zero_std_groups`` are taken."""


class Task(Configurable, ABC):
    """Prompts, a tokenizer and a reward: subclass it, in any package, to train on something new.

    The constructor reads and checks all input and raises ConfigError, so nothing is found to be
    wrong after processes have started. It ends in :meth:`set_tokenizer`::

        class Shout(Task):
            @dataclass(kw_only=True, slots=True)
            class Config(Task.Config):
                path: str = "words.txt"

            def __init__(self, config, *, seed, model):
                super().__init__(config, seed=seed, model=model)
                ...
                self.set_tokenizer(tokenizer, stop_token_ids=(tokenizer.eos_token_id,))

    Long work calls :func:`tell_progress` now and then. The methods :meth:`prompt`,
    :meth:`eval_prompts` and :meth:`score` say the rest.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        max_prompt_tokens: Annotated[int, at_least(1, 10**8)] = 1024
        """Maximum length of a prompt, in tokens. Longer prompts are refused before the run
        starts."""

        def build_scorer(self, *, seed: int, model: ModelConfig) -> "Task":
            """Build a task that has to decode and score only, as a reward worker needs it."""
            options = {"only_scores": True} if vars(self._owner).get("can_only_score") else {}
            return cast(Task, self.build(seed=seed, model=model, **options))

    can_only_score: ClassVar[bool] = False
    """Whether the constructor takes ``only_scores=True``, by which a task leaves out its prompts.
    Reward workers then start without reading the data. A subclass that can do so too says it again.
    """

    tokenizer: "PreTrainedTokenizerFast"
    """Turns text into tokens and back; exported beside the trained weights."""

    stop_token_ids: tuple[int, ...]
    """Any of these tokens ends a completion, and is its last token."""

    def __init__(self, config: Config, *, seed: int, model: ModelConfig):
        self.config = config
        self.seed = seed
        self.shape = shape_of(model)

    @abstractmethod
    def prompt(self, prompt_id: int) -> Prompt:
        """Prompt ``prompt_id`` (from 0, without end) of the training stream: a function of (seed,
        prompt_id) alone.
        """

    @abstractmethod
    def eval_prompts(self, count: int) -> list[Prompt]:
        """The first ``count`` prompts that training never sees; all of them where there are fewer.

        They are the same for every seed, and their prompt_ids are a numbering of their own, from 0.
        """

    @abstractmethod
    def score(self, prompt: Prompt, text: str, completion: Completion) -> Score:
        """Score ``completion``, whose :meth:`decode`-d tokens are ``text``.

        May run in any thread.
        """

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of ``tokens`` without special tokens."""
        return cast(str, self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def set_tokenizer(
        self, tokenizer: "PreTrainedTokenizerFast", stop_token_ids: Sequence[int]
    ) -> None:
        """Adopt a tokenizer.

        Raises ConfigError if the model has too few embeddings or nothing ends a completion.
        """
        size = len(tokenizer)
        if size > self.shape.vocab_size:
            raise ConfigError(
                f"model.vocab_size: {self.shape.vocab_size} is smaller than the tokenizer's "
                f"vocabulary; set it to {size} or more, or, with model.hf_path, use the tokenizer "
                "of that model"
            )
        if not stop_token_ids:
            raise ConfigError(
                "model.hf_path: its tokenizer names no eos_token, so no completion could end; set "
                "one"
            )
        self.tokenizer = tokenizer
        try:
            self.stop_token_ids = tuple(map(operator.index, stop_token_ids))
        except TypeError:
            self.stop_token_ids = (-1,)
        if not all(0 <= token < self.shape.vocab_size for token in self.stop_token_ids):
            raise ConfigError(
                f"task: {type(self).__name__} names the stop tokens {shown(stop_token_ids)}; they "
                f"must be token ids below {self.shape.vocab_size}: does the tokenizer have an "
                "eos_token?"
            )

    def describe(self, folder: Path) -> None:
        """Write the tokenizer and the tokens that end a completion into the folder of an exported
        model.

        Files that the export took over from the model it began with stay as they are.
        """
        ids = {name: getattr(self.tokenizer, name) for name in ("bos_token_id", "pad_token_id")}
        stops = [*self.stop_token_ids]
        ids["eos_token_id"] = stops if len(stops) > 1 else next(iter(stops), None)
        config = folder / "config.json"
        generation = folder / "generation_config.json"
        if not (folder / "tokenizer_config.json").exists():
            self.tokenizer.save_pretrained(folder)
            config.write_text(json.dumps(json.loads(config.read_text()) | ids, indent=2))
        if not generation.exists():
            generation.write_text(json.dumps(ids, indent=2))

    def prompt_limit(self) -> tuple[int, str]:
        """Return the longest prompt allowed, in tokens, and the field that sets this limit."""
        own = self.config.max_prompt_tokens
        longest = self.shape.max_seq_len
        if own < longest - 1:
            return own, f"task.max_prompt_tokens={own}"
        return longest - 1, f"model.max_seq_len={longest} with room for one token more"


_listener: ContextVar[Callable[[str], None] | None] = ContextVar("listener", default=None)


def tell_progress(text: str) -> None:
    """Show ``text``, such as "read 2,000 of 9,000 lines", while a task is built; call it as often
    as you like.
    """
    if (listener := _listener.get()) is not None:
        listener(text)


@contextmanager
def showing_progress(listener: Callable[[str], None]) -> Iterator[None]:
    """Pass what is told within the block to ``listener``."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def epoch_index(seed: int, prompt_id: int, size: int) -> int:
    """Return which of ``size`` examples prompt ``prompt_id`` shows: every epoch shows each once, in
    an order of its own.
    """
    epoch, place = divmod(prompt_id, size)
    return _epoch_order(seed, epoch, size)[place]


@lru_cache(maxsize=16)  # a mixture asks its tasks alternately
def _epoch_order(seed: int, epoch: int, size: int) -> list[int]:
    order = list(range(size))
    # A string seed is hashed by its bytes, so the order is the same in every process.
    random.Random(f"epoch order/{seed}/{epoch}").shuffle(order)
    return order
