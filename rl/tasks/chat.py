"""Tasks of questions that are asked through the chat template of a model."""

from abc import abstractmethod
from array import array
from dataclasses import dataclass
from itertools import compress
from operator import not_
from typing import Annotated, ClassVar, cast

from rl.data.jsonl import tell_progress
from rl.data.order import choose_held_out, epoch_index
from rl.environments.task import Task
from rl.errors import ConfigError
from rl.model.shape import ModelConfig
from rl.model.tokenizer import load_tokenizer, read_stop_token_ids, require_chat_template
from rl.types import Prompt
from rl.types.rules import SHARE

CHUNK = 2000  # prompts between two reports of progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One question; ``answer`` is what the task scores against."""

    number: int
    """Number of the question in its source, such as the line of a file."""

    question: str
    answer: str


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
        ``evaluation.prompts`` 0."""

        system_prompt: str = ""
        """System message of the conversation; empty for none."""

        instruction: str = ""
        """Text that follows each question in the user's message."""

        enable_thinking: bool = False
        """Whether to enable thinking in the chat template; Qwen3's then opens a ``<think>``
        block."""

    config: Config
    field: ClassVar[str]
    """Field of the config that names the questions, such as ``"path"``."""

    unit: ClassVar[str]
    """Unit of :attr:`Problem.number`, such as ``"line"``."""

    def __init__(self, config: Config, *, seed: int, model: ModelConfig, only_scores: bool = False):
        folder = model.hf_path
        if folder is None:
            raise ConfigError("model.hf_path: not set; name a folder with model and tokenizer")
        super().__init__(config, seed=seed, model=model)
        self.source = getattr(config, self.field)
        problems = [] if only_scores else self.read_problems()
        tokenizer = load_tokenizer(folder)
        require_chat_template(tokenizer)
        self.set_tokenizer(tokenizer, read_stop_token_ids(folder, tokenizer))
        if only_scores:
            return
        texts = [each.question for each in problems]
        named = f"task.{self.field}"
        held_out = choose_held_out(texts, config.held_out_fraction, named, self.source)
        questions = self._make_questions(problems)
        self.held_out = list(compress(questions, held_out))
        self.train = list(compress(questions, map(not_, held_out)))

    @abstractmethod
    def read_problems(self) -> list[Problem]:
        """Return all questions. Raises ConfigError, naming the first invalid one."""

    def prompt(self, prompt_id: int) -> Prompt:
        return self.train[epoch_index(self.seed, prompt_id, len(self.train))].prompt(prompt_id)

    def eval_prompts(self, count: int) -> list[Prompt]:
        return [question.prompt(place) for place, question in enumerate(self.held_out[:count])]

    def _make_questions(self, problems: list[Problem]) -> list[_Question]:
        questions = list[_Question]()
        for start in range(0, len(problems), CHUNK):
            tell_progress(f"tokenised {start:,} of {len(problems):,} questions of {self.source}")
            chunk = problems[start : start + CHUNK]
            texts = [self._render(problem.question) for problem in chunk]
            rows = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
            questions += [
                _Question(text, array("i", row), problem.answer)
                for text, row, problem in zip(texts, rows, chunk, strict=True)
            ]
        self._check_lengths(problems, [len(question.tokens) for question in questions])
        return questions

    def _render(self, question: str) -> str:
        messages = [{"role": "user", "content": f"{question}\n{self.config.instruction}".strip()}]
        if self.config.system_prompt:
            messages.insert(0, {"role": "system", "content": self.config.system_prompt})
        options = {"enable_thinking": self.config.enable_thinking, "add_generation_prompt": True}
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except Exception as error:  # the template is a program
            line = f" in line {error.lineno}" if hasattr(error, "lineno") else ""
            roles = " and ".join(message["role"] for message in messages)
            problem = (
                f"the chat template in {self.tokenizer.name_or_path!r} fails for messages of "
                f"{roles}: {type(error).__name__}: {error}{line}"
            )
            raise ConfigError(problem, field="model.hf_path") from None
        return cast(str, text)

    def _check_lengths(self, problems: list[Problem], lengths: list[int]) -> None:
        limit, field = self.prompt_limit()
        long = [
            (length, problem.number)
            for length, problem in zip(lengths, problems, strict=True)
            if length > limit
        ]
        if long:
            length, number = long[0]
            problem = (
                f"{self.source} {self.unit} {number}: its prompt has {length} tokens, more than "
                f"{field} allows ({len(long)} such {self.unit}s, the longest of {max(long)[0]} "
                "tokens)"
            )
            fix = f"raise the limit or leave such {self.unit}s out"
            raise ConfigError(problem, field=f"task.{self.field}", fix=fix)


class ChatJsonl(ChatTask):
    """Task of a JSONL file with one question a line. A subclass reads the file and scores."""

    @dataclass(kw_only=True, slots=True)
    class Config(ChatTask.Config):
        path: str = ""
        """JSONL file, one question a line."""

    config: Config
    field: ClassVar[str] = "path"
    unit: ClassVar[str] = "line"
