"""Task of word problems with numeric answers, from a JSONL file in GSM8K's format."""

import logging
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from rl.data.jsonl import read_rows
from rl.environments.task import Score
from rl.tasks.chat import ChatJsonl, Problem
from rl.types import Completion, Prompt

NUMBER = (
    r"(?:(?<![\w)}])-)?(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?|(?:(?<![\w)}])-)?(?<!\d)\.\d+"
)
FRACTION = r"-?\\[dt]?frac\{-?\d+\}\{\d+\}|(?:(?<![\w)}])-)?\d+\s*/\s*\d+"
VALUE = re.compile(f"{FRACTION}|{NUMBER}")
MARKED = re.compile(
    r"####(?P<line>(?:(?!####|\\boxed\{)[^\n])*)|\\boxed\{(?P<box>(?:[^{}]|\{[^{}]*\})*)\}"
)
REFERENCE = re.compile(rf"####\s*\$?({NUMBER})\s*$")
LONGEST_VALUE = 40


class Gsm8kJsonl(ChatJsonl):
    """Task of lines ``{"question": …, "answer": "… #### 42"}``; reward 1 for the number, else 0.

    Tokenizer and chat template are those of ``model.hf_path``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ChatJsonl.Config):
        path: str = ""
        """JSONL file. Each line has ``question`` and ``answer``, which ends in ``#### NUMBER``."""

        instruction: str = (
            "Think step by step, then give the answer on a line of its own, as: #### NUMBER"
        )
        """Text that follows each question in the user's message."""

    config: Config
    can_only_score: ClassVar[bool] = True

    def __init__(self, config: Config, **options: Any):
        # math_verify warns that its timeouts are off, which is intended.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        super().__init__(config, **options)

    def read_problems(self) -> list[Problem]:
        problems = []
        for row in read_rows(
            self.config.path, field="task.path", form='{"question": …, "answer": …}'
        ):
            question = row.text("question").strip()
            answer = reference_number(row.text("answer"))
            if answer is None:
                problem = "field 'answer' does not end in '#### NUMBER'"
                raise row.error(problem, fix="add the number")
            problems.append(Problem(number=row.line, question=question, answer=answer))
        return problems

    def score(self, prompt: Prompt, text: str, completion: Completion) -> Score:
        """Return the score. Metric ``answered``: the text has a value; ``format``: the value is
        marked by ``####`` or ``\\boxed``.
        """
        answer, marked = final_answer(text)
        correct = answer is not None and same_value(answer, prompt.answer)
        metrics = {"answered": float(answer is not None), "format": float(marked)}
        return Score(reward=float(correct), correct=correct, metrics=metrics)


def reference_number(solution: str) -> str | None:
    """Return ``"1234"`` for a solution that ends in ``#### 1,234``; None without such an end."""
    found = REFERENCE.search(plain(solution))
    return found[1].replace(",", "") if found else None


def final_answer(text: str) -> tuple[str | None, bool]:
    """Return the final number or fraction of ``text``, and whether it was marked as the answer.

    The last ``#### x`` or ``\\boxed{x}`` counts. It must hold exactly one value: a list of guesses
    is no answer. Without a mark the last value of the text counts.
    """
    text = plain(text)
    *_, mark = [None, *MARKED.finditer(text)]
    marked = mark is not None
    values = VALUE.findall(text if mark is None else mark["line"] or mark["box"] or "")
    if not values or (marked and len(values) > 1) or len(values[-1]) > LONGEST_VALUE:
        return None, marked
    return values[-1].replace(",", ""), marked


def same_value(answer: str, reference: str) -> bool:
    """Whether two values are equal as numbers: 0.5 is 1/2, and 42.0 is 42."""
    from math_verify import verify

    # Its timeouts are signals, which only the main thread may set. All values here are short.
    return verify(_parse(reference), _parse(answer), timeout_seconds=None)


def plain(text: str) -> str:
    """Return ``text`` without currency signs and without LaTeX's spaces within numbers."""
    for old, new in (("\\$", ""), ("$", ""), ("{,}", ","), ("\\!", ""), ("\\,", ""), ("−", "-")):
        text = text.replace(old, new)
    return text


@lru_cache(maxsize=65536)
def _parse(value: str) -> list:
    from math_verify import parse

    return parse(f"${value}$", parsing_timeout=None)
