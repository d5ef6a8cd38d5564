"""Word problems with a number as their answer, from a JSONL file in GSM8K's form."""

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

from rl.errors import ConfigError
from rl.model.hugging_face import read_json
from rl.model.shape import ModelConfig
from rl.rules import SHARE
from rl.tasks.base import Score, Task, epoch_index, tell_progress
from rl.tasks.math_answer import final_answer, reference_number, same_value
from rl.types import Completion, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHUNK = 2000  # prompts that are made before progress is shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One line of the file; ``answer`` is a plain number such as ``"1234"``."""

    line: int
    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class _Question:
    """A prompt without its place. An array takes a tenth of a list's memory."""

    text: str
    tokens: array
    answer: str

    def prompt(self, prompt_id: int) -> Prompt:
        return Prompt(
            prompt_id=prompt_id, tokens=self.tokens.tolist(), text=self.text, answer=self.answer
        )


class Gsm8kJsonl(Task):
    """Lines of ``{"question": …, "answer": "… #### 42"}``; reward 1 for the right number, else 0.

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
        if model.hf_path is None:
            raise ConfigError(
                "model.hf_path: not set; name a model folder with tokenizer and chat template"
            )
        super().__init__(config, seed=seed, model=model)
        # It warns that its timeouts are off, which is what we ask for.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        problems = [] if only_scores else read_problems(config.path)
        tokenizer = load_tokenizer(model.hf_path)
        self.set_tokenizer(tokenizer, read_stop_token_ids(model.hf_path, tokenizer))
        if only_scores:
            return
        held_out = choose_held_out(
            [problem.question for problem in problems], config.held_out_fraction, config.path
        )
        questions = self._make_questions(problems)
        self.held_out = list(compress(questions, held_out))
        self.train = list(compress(questions, map(not_, held_out)))

    def prompt(self, prompt_id: int) -> Prompt:
        return self.train[epoch_index(self.seed, prompt_id, len(self.train))].prompt(prompt_id)

    def eval_prompts(self, count: int) -> list[Prompt]:
        return [question.prompt(place) for place, question in enumerate(self.held_out[:count])]

    def score(self, prompt: Prompt, text: str, completion: Completion) -> Score:
        """``answered``: a value was found; ``format``: it was marked by ``####`` or ``\\boxed``."""
        answer, marked = final_answer(text)
        correct = answer is not None and same_value(answer, prompt.answer)
        metrics = {"answered": float(answer is not None), "format": float(marked)}
        return Score(reward=float(correct), correct=correct, metrics=metrics)

    def _make_questions(self, problems: list[Problem]) -> list[_Question]:
        questions = list[_Question]()
        for start in range(0, len(problems), CHUNK):
            tell_progress(
                f"tokenised {start:,} of {len(problems):,} questions of {self.config.path}"
            )
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
        thinking = self.config.enable_thinking
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
            )
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
            others = ""
            if len(long) > 1:
                others = f" ({len(long)} such lines, the longest of {max(long)[0]} tokens)"
            raise ConfigError(
                f"task.path: {self.config.path} line {line}: its prompt has {length} tokens, more "
                f"than {field} allows{others}; raise the limit or leave such lines out"
            )


def read_problems(path: str) -> list[Problem]:
    """All problems of a JSONL file. Raises ConfigError that names the first line it cannot use."""
    if not path:
        raise ConfigError(
            "task.path: not set; name a JSONL file with fields 'question' and 'answer'"
        )
    try:
        problems = list(_parse_lines(path))
    except FileNotFoundError:
        raise ConfigError(f"task.path: there is no file {path!r}") from None
    except OSError as error:  # a folder, no permission, a broken disk
        raise ConfigError(f"task.path: {path!r} cannot be read: {error.strerror}") from None
    if not problems:
        raise ConfigError(
            f"task.path: {path} is empty; each line should be a JSON object with 'question' and "
            "'answer'"
        )
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
                raise ConfigError(
                    f'{where}: not a JSON object; write {{"question": …, "answer": …}}'
                )
            for name in ("question", "answer"):
                if not isinstance(row.get(name), str) or not row[name].strip():
                    raise ConfigError(f"{where}: field {name!r} is missing or not text")
                if not _is_unicode(row[name]):
                    raise ConfigError(
                        f"{where}: field {name!r} has half of a surrogate pair, as \\ud800; remove "
                        "it"
                    )
            answer = reference_number(row["answer"])
            if answer is None:
                raise ConfigError(f"{where}: field 'answer' has no '#### NUMBER' at its end")
            yield Problem(line=number, question=row["question"].strip(), answer=answer)


def _is_unicode(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def choose_held_out(questions: list[str], fraction: float, path: str) -> list[bool]:
    """Which questions are for evaluation: those whose hash is lowest, so copies of one
    never part.
    """
    if not 0 < fraction < 1:
        raise ConfigError(f"task.held_out_fraction: {fraction} is not between 0 and 1")
    hashes = [blake2b(question.encode(), digest_size=8).digest() for question in questions]
    different = sorted(set(hashes))
    if len(different) < 2:
        raise ConfigError(
            f"task.path: {path} has {len(different)} different question; at least 2 are needed, "
            "one to train on and one held out"
        )
    count = min(math.ceil(len(different) * fraction), len(different) - 1)
    held_out = set(different[:count])
    return [digest in held_out for digest in hashes]


def load_tokenizer(hf_path: str) -> "PreTrainedTokenizerFast":
    """Return the tokenizer of a Hugging Face folder.

    Raises ConfigError, naming the file, if a file is damaged, or tokenizer.json or the chat
    template is missing.
    """
    from transformers import PreTrainedTokenizerFast

    files = [Path(hf_path) / name for name in ("tokenizer.json", "tokenizer_config.json")]
    if not files[0].is_file():
        raise ConfigError(
            f"model.hf_path: {hf_path!r} has no tokenizer.json; save the tokenizer beside the model"
        )
    for path in filter(Path.exists, files):
        read_json("model.hf_path", path)
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(hf_path, local_files_only=True)
    except Exception as error:  # of many kinds, from transformers, tokenizers and Python
        cause = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError(
            f"model.hf_path: the tokenizer in {hf_path!r} cannot be loaded: {cause}; save it again "
            "by save_pretrained"
        ) from None
    if not tokenizer.chat_template:
        raise ConfigError(
            f"model.hf_path: the tokenizer in {hf_path!r} has no chat template; use an "
            "instruction-tuned model or add chat_template.jinja"
        )
    return tokenizer


def read_stop_token_ids(hf_path: str, tokenizer: "PreTrainedTokenizerFast") -> tuple[int, ...]:
    """Return the tokenizer's eos token and those that generation_config.json adds, sorted.

    Raises ConfigError for an eos_token_id that is no token of the tokenizer.
    """
    ids = {tokenizer.eos_token_id} - {None}
    path = Path(hf_path) / "generation_config.json"
    if path.exists():
        eos = read_json("model.hf_path", path).get("eos_token_id")
        listed = eos if isinstance(eos, list) else [] if eos is None else [eos]
        if not all(type(token) is int and 0 <= token < len(tokenizer) for token in listed):
            raise ConfigError(
                f"model.hf_path: eos_token_id in {path} is {eos!r}; it must be one or several of "
                f"the {len(tokenizer)} token ids of the tokenizer beside it"
            )
        ids.update(listed)
    return tuple(sorted(ids))
