"""Tasks of questions that are asked through the chat template of a model."""

import json
import logging
from abc import abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from rl.data.jsonl import Row, read_rows, tell_progress
from rl.data.order import choose_held_out, epoch_index, text_hash
from rl.data.sources import HeldOutConfig, Opened, open_source
from rl.data.stored import kept, parted
from rl.dialects.dialect import ConversationError
from rl.dialects.template import stop_tokens, template_text
from rl.environments.task import Task
from rl.errors import ConfigError, printable
from rl.model.shape import ModelConfig
from rl.model.tokenizer import load_tokenizer, require_chat_template, write_stop_tokens
from rl.types import Prompt
from rl.types.rules import SHARE

CHUNK = 2000  # prompts between two reports of progress
MOST_NAMED = 10

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One question; ``answer`` is what the task scores against."""

    number: int
    """Number of the question in its source, such as the line of a file."""

    question: str
    answer: str
    before: Sequence[Mapping[str, Any]] = ()
    """Messages before the question, such as solved examples."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template, which take precedence over the task's."""

    @property
    def hash(self) -> bytes:
        """Hash of the conversation, which copies of the question share."""
        before = json.dumps([*self.before]) if self.before else ""
        return text_hash(before + self.question)


@dataclass(frozen=True, slots=True)
class _Question:
    """A prompt without its id. An array takes a tenth of a list's memory."""

    text: str
    tokens: array
    answer: str

    def prompt(self, prompt_id: int) -> Prompt:
        tokens = self.tokens.tolist()
        return Prompt(prompt_id=prompt_id, tokens=tokens, text=self.text, answer=self.answer)


class ChatTask(Task):
    """Task of questions that are all known at the start.

    Tokenizer and chat template are those of ``model.hf_path``. A subclass gives the questions and
    scores; it can set ``can_only_score``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        held_out_fraction: Annotated[float, SHARE] = 0.1
        """Share of the questions that are held out for evaluation, chosen by their hash. 0 needs
        ``evaluation.prompts`` 0. With 1 the task is for evaluation alone."""

        system_prompt: str = ""
        """System message of the conversation; empty for none."""

        instruction: str = ""
        """Text that follows each question in the user's message."""

        enable_thinking: bool = False
        """Whether to enable thinking in the chat template; Qwen3's then opens a ``<think>``
        block."""

    config: Config
    field: str
    """Field of the config that names the questions, such as ``"path"``."""

    unit: str
    """Unit of :attr:`Problem.number`, such as ``"line"``."""

    table: Opened = ""
    """Table that the questions come from, or path of their file; empty for other sources."""

    held_out_table: Opened | None = None
    """Table of the questions for evaluation; None if they are a share of the others."""

    def __init__(self, config: Config, *, seed: int, model: ModelConfig, only_scores: bool = False):
        folder = model.hf_path
        if folder is None:
            raise ConfigError("model.hf_path: not set; name a folder with model and tokenizer")
        super().__init__(config, seed=seed, model=model)
        self.source = getattr(config, self.field)
        problems = [] if only_scores else self.read_problems()
        tokenizer = load_tokenizer(folder)
        require_chat_template(tokenizer)
        self.set_tokenizer(tokenizer, stop_tokens(tokenizer))
        if only_scores:
            return
        hashes = list[bytes]()
        questions = kept(self._make_questions(problems, hashes), self.table)
        if self.held_out_table is not None:
            self.field, self.table = "held_out_path", self.held_out_table
            self.source = config.held_out_path or self.source  # type: ignore[attr-defined]
            others = kept(self._make_questions(self.read_problems(), []), self.table)
            self.train, self.held_out = questions, others
            return
        named = f"task.{self.field}"
        held_out = choose_held_out(hashes, config.held_out_fraction, named, self.source)
        self.train, self.held_out = parted(questions, held_out)

    def warn(self, what: str, rows: list[str]) -> None:
        """Log a warning that says ``what`` and names the first of ``rows``, if there are any."""
        if rows:
            more = f" and {len(rows) - MOST_NAMED} more" if len(rows) > MOST_NAMED else ""
            named = printable(f"{'; '.join(rows[:MOST_NAMED])}{more}")
            logger.warning("task.%s: %s: %s: %s", self.field, self.source, what, named)

    @abstractmethod
    def read_problems(self) -> Iterable[Problem]:
        """Return all questions. Raises ConfigError, naming the first invalid one."""

    def prompt(self, prompt_id: int) -> Prompt:
        return self.train[epoch_index(self.seed, prompt_id, len(self.train))].prompt(prompt_id)

    def eval_prompts(self, count: int) -> list[Prompt]:
        return [question.prompt(place) for place, question in enumerate(self.held_out[:count])]

    def describe(self, folder: Path) -> None:
        super().describe(folder)
        write_stop_tokens(folder, self.stop_token_ids)

    def _make_questions(
        self, problems: Iterable[Problem], hashes: list[bytes]
    ) -> Iterator[_Question]:
        """Yield the questions as prompts, and add the hash of each to ``hashes``. Raises
        ConfigError in the end if prompts are too long.
        """
        source = iter(problems)
        long = list[tuple[int, int]]()
        limit = self.prompt_limit()[0]
        while chunk := [*islice(source, CHUNK)]:
            texts = [self._render(problem) for problem in chunk]
            rows = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
            for text, row, problem in zip(texts, rows, chunk, strict=True):
                hashes.append(problem.hash)
                if len(row) > limit:
                    long.append((len(row), problem.number))
                yield _Question(text, array("i", row), problem.answer)
            tell_progress(f"tokenised {len(hashes):,} questions of {self.source}")
        if long:
            length, number = long[0]
            fault = (
                f"{self.source} {self.unit} {number}: its prompt has {length} tokens, more than "
                f"{self.prompt_limit()[1]} allows ({len(long)} such {self.unit}s, the longest of "
                f"{max(long)[0]} tokens)"
            )
            fix = f"raise the limit or leave such {self.unit}s out"
            raise ConfigError(fault, field=f"task.{self.field}", fix=fix)

    def _render(self, problem: Problem) -> str:
        content = f"{problem.question}\n{self.config.instruction}".strip()
        messages = [*problem.before, {"role": "user", "content": content}]
        if self.config.system_prompt and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.config.system_prompt})
        options = {"enable_thinking": self.config.enable_thinking, **problem.options}
        options["add_generation_prompt"] = True
        try:
            return template_text(self.tokenizer, messages, None, **options)
        except ConversationError as error:
            roles = " and ".join(message["role"] for message in messages)
            fault = f"{error}, for messages of {roles} in {self.tokenizer.name_or_path!r}"
            raise ConfigError(fault, field="model.hf_path") from None


class ChatJsonl(ChatTask):
    """Task of rows with one question each, such as the lines of a JSONL file. A subclass reads the
    rows and scores.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ChatTask.Config, HeldOutConfig):
        columns: dict[str, str] = field(default_factory=dict)
        """Names of columns by the fields that they hold, such as ``question`` from ``query``.
        Other fields have columns of their own names."""

    config: Config
    field = "path"

    def __init__(self, config: Config, *, only_scores: bool = False, **options: Any):
        if not only_scores:
            self.table = open_source(config, "task.path")
            if other := config.held_out():
                self.held_out_table = open_source(other, "task.held_out_path")
        super().__init__(config, only_scores=only_scores, **options)

    def rows(self, form: str) -> Iterator[Row]:
        """Yield the rows, with the columns of the config under the names of their fields. ``form``
        is an example of a row, for errors.
        """
        for row in read_rows(self.table, field=f"task.{self.field}", form=form):
            self.unit = row.unit
            yield row.renamed(self.config.columns)
