"""Task of word problems with short answers, in the form of GSM8K, MATH or DAPO-Math."""

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

from rl.data.jsonl import Row
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
QUESTIONS = ("question", "problem", "prompt")
ANSWERS = ("ground_truth", "answer", "solution")
"""Columns of the common sets. The first that a row has counts."""
BOX = r"\boxed"
LAST = 1000
"""Size of the end of a text in which a box is looked for, in characters."""
HUGE = re.compile(r"!|\^\{[^}]*\^|\^\w\^|\d{5}|\\(?:binom|sum|prod|int)")
"""Signs of an expression that algebra might compute for hours."""
REFERENCE = re.compile(rf"####\s*\$?({NUMBER})\s*$")
LONGEST_VALUE = 40


class Gsm8kJsonl(ChatJsonl):
    r"""Task of rows ``{"question": …, "answer": "… #### 42"}``; reward 1 for the answer, else 0.

    Rows of MATH (``problem``, and ``solution`` with ``\boxed{…}``) and of DAPO-Math (``prompt``,
    and ``reward_model`` with ``ground_truth``) are read too. Answers that are numbers or fractions
    are compared as numbers, others as LaTeX without its spaces and sizes, or by algebra.

    Tokenizer and chat template are those of ``model.hf_path``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ChatJsonl.Config):
        instruction: str = (
            "Think step by step, then give the answer on a line of its own, as: #### NUMBER"
        )
        """Text that follows each question in the user's message."""

        symbolic: bool = False
        """Whether answers that are no numbers are also right if math-verify finds them equal to the
        reference by algebra, as ``x(x+1)`` and ``x^2+x``."""

    config: Config
    can_only_score: ClassVar[bool] = True

    def __init__(self, config: Config, **options: Any):
        # math_verify warns that its timeouts are off, which is intended.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        super().__init__(config, **options)

    def read_problems(self) -> Iterator[Problem]:
        for row in self.rows('{"question": …, "answer": …}'):
            question = read_question(row)
            yield Problem(number=row.line, question=question, answer=read_answer(row))

    def score(self, prompt: Prompt, text: str, completion: Completion) -> Score:
        """Return the score. Metric ``answered``: the text has a value; ``format``: the value is
        marked by ``####`` or ``\\boxed``.
        """
        if VALUE.fullmatch(prompt.answer):
            answer, marked = final_answer(text)
            correct = answer is not None and same_value(answer, prompt.answer)
        else:
            answer = marked_expression(text)
            marked = answer is not None
            correct = answer == prompt.answer
            if self.config.symbolic and answer and not (correct or HUGE.search(answer)):
                correct = same_value(answer, prompt.answer)
        metrics = {"answered": float(answer is not None), "format": float(marked)}
        return Score(reward=float(correct), correct=correct, metrics=metrics)


def read_question(row: Row) -> str:
    """Return the question of a row, which may be the only message of a conversation."""
    name = next((name for name in QUESTIONS if name in row.value), QUESTIONS[0])
    match row.value.get(name):
        case [{"role": "user", "content": content}]:
            row = replace(row, value={name: content})
    return row.text(name).strip()


def read_answer(row: Row) -> str:
    """Return the number or expression that is the answer of a row."""
    checked = row.value.get("reward_model")
    row = replace(row, value={**row.value, **(checked if isinstance(checked, Mapping) else {})})
    names = [name for name in ANSWERS if name in row.value] or ["answer"]
    for name in names:
        if answer := reference_answer(row.text(name)):
            return answer
    problem = f"field {names[0]!r} does not end in '#### NUMBER' and has no \\boxed{{…}}"
    raise row.error(problem, fix="add the number")


def reference_answer(solution: str) -> str | None:
    """Return the answer of a solution: the number after ``####`` at its end, what its last
    ``\\boxed{…}`` holds, or the number that is all of it; None without any of them.
    """
    found = marked_expression(solution) if BOX in solution else solution.strip()
    short = plain(found or "")
    number = short.replace(",", "") if VALUE.fullmatch(short) else None
    return reference_number(solution) or number or (found if BOX in solution else None)


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


def marked_expression(text: str) -> str | None:
    """Return what the last ``\\boxed{…}`` of ``text`` holds, or else what follows its last ``####``
    in the line, as LaTeX without what changes its look alone; None without a mark.
    """
    from latex2sympy2_extended import NormalizationConfig, normalize_latex

    rules = NormalizationConfig(malformed_operators=True, boxed="last")
    line = text.rpartition("####")[2].partition("\n")[0] if "####" in text else ""
    return normalize_latex(text[-LAST:] if BOX in text else line, rules).replace(" ", "") or None


def same_value(answer: str, reference: str) -> bool:
    """Whether two values or expressions are equal: 0.5 is 1/2, and 42.0 is 42."""
    from math_verify import verify

    # Its timeouts are signals, which only the main thread may set. No value here is huge.
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
