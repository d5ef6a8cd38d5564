"""Protocol between a run and the task that it trains on."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, cast

from torchtitan.config import Configurable

from rl.errors import require, shown
from rl.metrics import Entry
from rl.model.shape import ModelConfig, shape_of
from rl.model.tokenizer import require_room
from rl.types import Completion, Prompt
from rl.types.rules import at_least

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


RESERVED_METRICS = ("correct", "mean", "zero_std_groups")  # reported as reward/NAME too


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Score of one completion.

    Numbers are Python's or numpy's, finite in float32. An invalid score drops its group.
    """

    reward: float | None
    """Number that the policy learns from. None abstains: the completion leaves its group."""

    correct: bool
    """Whether the completion is right, as counted by evaluation; Python's or numpy's bool."""

    metrics: Mapping[str, Entry] = field(default_factory=dict)
    """Numbers of the completion, reported as ``reward/NAME`` for the rollouts of a step. A number
    is averaged; ``Value.of(number, rule, weight)`` of :mod:`rl.metrics` has another reduction. The
    names ``correct``, ``mean`` and ``zero_std_groups`` are reserved."""


class Task(Configurable, ABC):
    """Prompts, a tokenizer and a reward. A subclass, in any package, is a new task.

    The constructor reads and checks all input and raises ConfigError, so that no process starts on
    invalid input. It ends in :meth:`set_tokenizer`::

        class Shout(Task):
            @dataclass(kw_only=True, slots=True)
            class Config(Task.Config):
                path: str = "words.txt"

            def __init__(self, config, *, seed, model):
                super().__init__(config, seed=seed, model=model)
                ...
                self.set_tokenizer(tokenizer, stop_token_ids=(tokenizer.eos_token_id,))

    Long work calls :func:`rl.data.jsonl.tell_progress` regularly. See the methods :meth:`prompt`,
    :meth:`eval_prompts` and :meth:`score`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        is_episodic: ClassVar[bool] = False
        """Whether rollouts are episodes of an environment."""

        max_prompt_tokens: Annotated[int, at_least(1, 10**8)] = 1024
        """Maximum length of a prompt, in tokens. Longer prompts are refused before the run
        starts."""

        def longest_sequence(self, max_tokens: int) -> int:
            """Return the maximum length of a sequence, in tokens, if an answer has at most
            ``max_tokens``.
            """
            return self.max_prompt_tokens + max_tokens

        def build_scorer(self, *, seed: int, model: ModelConfig) -> "Task":
            """Build a task that only decodes and scores, for a reward worker."""
            options = {"only_scores": True} if vars(self._owner).get("can_only_score") else {}
            return cast(Task, self.build(seed=seed, model=model, **options))

    can_only_score: ClassVar[bool] = False
    """Whether the constructor takes ``only_scores=True`` and then builds no prompts, so that reward
    workers start without reading the data. Not inherited: each subclass that can sets it again.
    """

    tokenizer: "PreTrainedTokenizerFast"
    """Tokenizer of the task, exported beside the trained weights."""

    stop_token_ids: tuple[int, ...]
    """Any of these tokens ends a completion, and is its last token."""

    def __init__(self, config: Config, *, seed: int, model: ModelConfig):
        self.config = config
        self.seed = seed
        self.shape = shape_of(model)

    @abstractmethod
    def prompt(self, prompt_id: int) -> Prompt:
        """Return prompt ``prompt_id`` (from 0, without end) of the training stream: a function of
        (seed, prompt_id) alone.
        """

    @abstractmethod
    def eval_prompts(self, count: int) -> list[Prompt]:
        """Return the first ``count`` prompts that training never sees, or all if there are fewer.

        They are the same for every seed, and their prompt_ids count from 0 too.
        """

    @abstractmethod
    def score(self, prompt: Prompt, text: str, completion: Completion) -> Score:
        """Score ``completion``, whose :meth:`decode`-d tokens are ``text``.

        May run in any thread. May be a coroutine function: then a reward worker awaits the scores
        of many completions at once, for instance those of a judge that is asked over a network.
        """

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of ``tokens`` without special tokens."""
        return cast(str, self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def set_tokenizer(
        self, tokenizer: "PreTrainedTokenizerFast", stop_token_ids: Sequence[int]
    ) -> None:
        """Set the tokenizer and the stop tokens.

        Raises ConfigError if the model has too few embeddings or no token ends a completion.
        """
        room = self.shape.vocab_size
        require_room(tokenizer, room)
        require(bool(stop_token_ids), "model.hf_path: its tokenizer names no eos_token; set one")
        require(
            all(isinstance(token, Integral) and 0 <= token < room for token in stop_token_ids),
            f"task: {type(self).__name__} names the stop tokens {shown(stop_token_ids)}; they must "
            f"be token ids below {room}: does the tokenizer have an eos_token?",
        )
        self.tokenizer = tokenizer
        self.stop_token_ids = tuple(map(int, stop_token_ids))

    def describe(self, folder: Path) -> None:
        """Write tokenizer and stop tokens into the folder of an exported model.

        Files that the export copied from the initial model stay as they are.
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
        """Return the maximum length of a prompt, in tokens, and the field that sets it."""
        limit = self.config.max_prompt_tokens
        longest = self.shape.max_seq_len
        if limit < longest - 1:
            return limit, f"task.max_prompt_tokens={limit}"
        return longest - 1, f"model.max_seq_len={longest} with room for one token more"
