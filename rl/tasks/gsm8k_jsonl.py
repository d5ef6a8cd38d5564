"""Task of word problems with numeric answers, from a JSONL file in GSM8K's format."""

import json
import logging
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import compress
from operator import not_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, cast

from rl.errors import ConfigError, require
from rl.model.hugging_face import read_json
from rl.model.shape import ModelConfig
from rl.rules import SHARE
from rl.tasks.base import Score, Task, epoch_index, tell_progress
from rl.tasks.math_answer import final_answer, reference_number, same_value
from rl.types import Completion, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHUNK = 2000  # prompts between two reports of progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One line of the file; ``answer`` is a plain number such as ``"1234"``."""

    line: int
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


class Gsm8kJsonl(Task):
    """Task of lines ``{"question": …, "answer": "… #### 42"}``; reward 1 for the number, else 0.

    Tokenizer and chat template are those of ``model.hf_path``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Task.Config):
        path: str = ""
        """JSONL file. Each line has ``question`` and ``answer``, which ends in ``#### NUMBER``."""

        held_out_fraction: Annotated[float, SHARE] = 0.1
        """Share of the questions that are held out for evaluation, chosen by their hash."""

        system_prompt: str = ""
        """System message of the conversation; empty for none."""

        instruction: str = (
            "Think step by step, then give the answer on a line of its own, as: #### NUMBER"
        )
        """Text that follows each question in the user's message."""

        enable_thinking: bool = False
        """Whether to enable thinking in the chat template; Qwen3's then opens a ``<think>``
        block."""

    config: Config
    can_only_score: ClassVar[bool] = True

    def __init__(self, config: Config, *, seed: int, model: ModelConfig, only_scores: bool = False):
        folder = model.hf_path
        if folder is None:
            raise ConfigError("model.hf_path: not set; name a folder with model and tokenizer")
        super().__init__(config, seed=seed, model=model)
        # math_verify warns that its timeouts are off, which is intended.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        problems = [] if only_scores else read_problems(config.path)
        tokenizer = load_tokenizer(folder)
        self.set_tokenizer(tokenizer, read_stop_token_ids(folder, tokenizer))
        if only_scores:
            return
        held_out = choose_held_out(problems, config.held_out_fraction, config.path)
        questions = self._make_questions(problems)
        self.held_out = list(compress(questions, held_out))
        self.train = list(compress(questions, map(not_, held_out)))

    def prompt(self, prompt_id: int) -> Prompt:
        return self.train[epoch_index(self.seed, prompt_id, len(self.train))].prompt(prompt_id)

    def eval_prompts(self, count: int) -> list[Prompt]:
        return [question.prompt(place) for place, question in enumerate(self.held_out[:count])]

    def score(self, prompt: Prompt, text: str, completion: Completion) -> Score:
        """Return the score. Metric ``answered``: the text has a value; ``format``: the value is
        marked by ``####`` or ``\\boxed``.
        """
        answer, marked = final_answer(text)
        correct = answer is not None and same_value(answer, prompt.answer)
        metrics = {"answered": float(answer is not None), "format": float(marked)}
        return Score(reward=float(correct), correct=correct, metrics=metrics)

    def _make_questions(self, problems: list[Problem]) -> list[_Question]:
        questions = list[_Question]()
        for start in range(0, len(problems), CHUNK):
            progress = f"{start:,} of {len(problems):,} questions of {self.config.path}"
            tell_progress(f"tokenised {progress}")
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
            raise ConfigError(
                f"model.hf_path: the chat template in {self.tokenizer.name_or_path!r} fails for "
                f"messages of {roles}: {type(error).__name__}: {error}{line}"
            ) from None
        return cast(str, text)

    def _check_lengths(self, problems: list[Problem], lengths: list[int]) -> None:
        limit, field = self.prompt_limit()
        long = [
            (length, problem.line)
            for length, problem in zip(lengths, problems, strict=True)
            if length > limit
        ]
        if long:
            length, line = long[0]
            raise ConfigError(
                f"task.path: {self.config.path} line {line}: its prompt has {length} tokens, more "
                f"than {field} allows ({len(long)} such lines, the longest of {max(long)[0]} "
                "tokens); raise the limit or leave such lines out"
            )


def read_problems(path: str) -> list[Problem]:
    """Return all problems of a JSONL file. Raises ConfigError, naming the first invalid line."""
    require(bool(path), "task.path: not set; name a JSONL file with 'question' and 'answer'")
    try:
        problems = list(_parse_lines(path))
    except FileNotFoundError:
        raise ConfigError(f"task.path: there is no file {path!r}") from None
    except OSError as error:  # a folder, no permission, a broken disk
        raise ConfigError(f"task.path: {path!r} cannot be read: {error.strerror}") from None
    require(bool(problems), f"task.path: {path} is empty; write one JSON object a line")
    return problems


def _parse_lines(path: str) -> Iterator[Problem]:
    with open(path, "rb") as lines:
        for number, raw in enumerate(lines, start=1):
            if number % 10_000 == 0:
                tell_progress(f"read {number:,} lines of {path}")
            if not raw.strip():
                continue
            where = f"task.path: {path} line {number}"
            try:
                row = json.loads(raw)
            except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or nested too deep
                raise ConfigError(f"{where}: not JSON: {error}") from None
            if not isinstance(row, dict):
                raise ConfigError(f'{where}: not a JSON object {{"question": …, "answer": …}}')
            for name in ("question", "answer"):
                text = row.get(name)
                if not isinstance(text, str) or not text.strip():
                    raise ConfigError(f"{where}: field {name!r} is missing or not text")
                if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
                    problem = "has half of a surrogate pair, as \\ud800; remove it"
                    raise ConfigError(f"{where}: field {name!r} {problem}")
            answer = reference_number(row["answer"])
            if answer is None:
                raise ConfigError(f"{where}: field 'answer' has no '#### NUMBER' at its end")
            yield Problem(line=number, question=row["question"].strip(), answer=answer)


def choose_held_out(problems: list[Problem], fraction: float, path: str) -> list[bool]:
    """Return which problems are for evaluation: those whose questions have the lowest hashes, so
    that copies of a question stay together.
    """
    require(0 < fraction < 1, f"task.held_out_fraction: {fraction} is not between 0 and 1")
    hashes = [blake2b(each.question.encode(), digest_size=8).digest() for each in problems]
    different = sorted(set(hashes))
    require(
        len(different) >= 2,
        f"task.path: {path} has {len(different)} different question; it must have 2 or more, one "
        "to train on and one held out",
    )
    count = min(math.ceil(len(different) * fraction), len(different) - 1)
    held_out = set(different[:count])
    return [digest in held_out for digest in hashes]


def load_tokenizer(hf_path: str) -> "PreTrainedTokenizerFast":
    """Return the tokenizer of a Hugging Face folder.

    Raises ConfigError, naming the file, if a file is damaged, or if tokenizer.json or the chat
    template is missing.
    """
    from transformers import PreTrainedTokenizerFast

    files = [Path(hf_path) / name for name in ("tokenizer.json", "tokenizer_config.json")]
    remedy = "save the tokenizer beside the model"
    require(files[0].is_file(), f"model.hf_path: {hf_path!r} has no tokenizer.json; {remedy}")
    for path in filter(Path.exists, files):
        read_json("model.hf_path", path)
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(hf_path, local_files_only=True)
    except Exception as error:  # of many kinds, from transformers, tokenizers and Python
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(
            f"model.hf_path: the tokenizer in {hf_path!r} cannot be loaded: {cause}; save it again"
        ) from None
    require(
        bool(tokenizer.chat_template),
        f"model.hf_path: the tokenizer in {hf_path!r} has no chat template; use an "
        "instruction-tuned model or add chat_template.jinja",
    )
    return tokenizer


def read_stop_token_ids(hf_path: str, tokenizer: "PreTrainedTokenizerFast") -> tuple[int, ...]:
    """Return the eos tokens of the tokenizer and of generation_config.json, sorted.

    Raises ConfigError for an eos_token_id that the tokenizer does not have.
    """
    ids = {tokenizer.eos_token_id} - {None}
    path = Path(hf_path) / "generation_config.json"
    if path.exists():
        eos = read_json("model.hf_path", path).get("eos_token_id")
        listed = eos if isinstance(eos, list) else [] if eos is None else [eos]
        size = len(tokenizer)
        require(
            all(type(token) is int and 0 <= token < size for token in listed),
            f"model.hf_path: eos_token_id in {path} is {eos!r}; it must be one or several of the "
            f"{size} token ids of the tokenizer",
        )
        ids.update(listed)
    return tuple(sorted(ids))
