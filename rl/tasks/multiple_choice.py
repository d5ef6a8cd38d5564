"""Task of multiple-choice questions, in the form of GPQA, MMLU or MMLU-Pro."""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from rl.data.jsonl import Row
from rl.dialects.answers import without_thoughts
from rl.environments.task import Score
from rl.errors import shown
from rl.tasks.chat import ChatJsonl, Problem
from rl.types import Completion, Prompt

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
FORM = '{"question": …, "choices": [text, …], "answer": 0}'
STYLE = r"\\(?:[(,;:! ]|(?:\w?box|text|math|bold|under|operator|bf|it|rm|[Ll]arge)[a-z]*\b)"
OPEN = rf"(?:[\s*_~`\"'“‘$(\[{{]|{STYLE}){{0,40}}"
"""Markup before a letter."""
NO_CHOICE = r"(?:['’]\w|[ \t]+(?!(?:is|because|since)\b)[a-z])"  # "I believe", "A dog"
BETWEEN = r"[\s,)\]*_]{0,9}(?:[,&]|\b(?:or|and)\b|\\text\{\W*(?:or|and))\W*|[ \t]{1,9}"
OTHERS = rf"(?:{BETWEEN})[A-Z]\b(?!(?<=[AI]){NO_CHOICE})"
LETTER = rf"{OPEN}([A-Z])(?=[`*_\"'”’~)\]}}.,:;$\s\\]|$)(?!(?<=[AI]){NO_CHOICE}|{OTHERS})"
MARKED = re.compile(
    rf"\b(?i:answer)[*_\s]*(?:\b(?i:is)\b[*_\s]*)?[:：]{LETTER}|\\(?:boxed|fbox)\s?\{{{LETTER}"
)
ALONE = re.compile(rf"{LETTER}[`*_\"'”’~)\]}}.$\s\\]*")


class MultipleChoice(ChatJsonl):
    """Task of rows ``{"question": …, "choices": [text, …], "answer": 0}``; reward 1 for the letter
    of the right choice, else 0.

    - Rows of MMLU-Pro (``options``, and ``answer`` with a letter) and of GPQA (``Question``,
      ``Correct Answer``, ``Incorrect Answer 1`` …) are read too. The choices of GPQA are in an
      order that depends on the question alone.
    - The answer is the letter after the last ``Answer:`` or in the last ``\\boxed{…}``, or the
      whole completion.

    Tokenizer and chat template are those of ``model.hf_path``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ChatJsonl.Config):
        instruction: str = "Think step by step, then end with a line of the form: Answer: LETTER"
        """Text that follows each question in the user's message."""

    config: Config
    can_only_score: ClassVar[bool] = True

    def read_problems(self) -> Iterator[Problem]:
        for row in self.rows(FORM):
            question, choices, right = read_choices(row)
            lines = [f"{letter}) {text}" for letter, text in zip(LETTERS, choices, strict=False)]
            text = "\n".join([f"{question}\n", *lines, ""])
            yield Problem(number=row.line, question=text, answer=LETTERS[right])

    def score(self, prompt: Prompt, text: str, completion: Completion) -> Score:
        """Return the score. Metric ``answered``: the text has an answer."""
        answer = chosen_letter(without_thoughts(text, prompt))
        correct = answer == prompt.answer
        metrics = {"answered": float(answer is not None)}
        return Score(reward=float(correct), correct=correct, metrics=metrics)


def chosen_letter(text: str) -> str | None:
    """Return the letter that ``text`` gives as its answer; None without one."""
    *_, mark = [ALONE.fullmatch(text.strip()), *MARKED.finditer(text)]
    return None if mark is None else next(filter(None, mark.groups()))


def read_choices(row: Row) -> tuple[str, list[str], int]:
    """Return the question of a row, its choices, and the place of the right one."""
    if "Correct Answer" in row.value:
        wrong = [name for name in row.value if re.fullmatch(r"Incorrect Answer \d+", name)]
        choices = [row.text(name).strip() for name in ("Correct Answer", *wrong)]
        answer = choices[0]
        question = row.text("Question").strip()
        random.Random(f"choices/{question}").shuffle(choices)
        return question, choices, choices.index(answer)
    choices = row.value.get("choices", row.value.get("options"))
    marked = row.value.get("answer")
    right = LETTERS.find(marked) if isinstance(marked, str) and len(marked) == 1 else marked
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise row.error(f"field 'choices' is {shown(choices)}; write a list of texts")
    if type(right) is not int or not 0 <= right < len(choices) <= len(LETTERS):
        raise row.error(f"field 'answer' is {shown(marked)}; write the place or letter of a choice")
    return row.text("question").strip(), choices, right
