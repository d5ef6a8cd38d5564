"""Task of word problems with short answers, in the form of GSM8K, MATH or DAPO-Math."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Annotated, Any, ClassVar

from rl.data.examples import template_options
from rl.data.jsonl import Row
from rl.dialects.answers import without_thoughts
from rl.dialects.dialect import ConversationError, checked_messages, usual_messages
from rl.environments.task import Score
from rl.errors import ConfigError
from rl.tasks.algebra import is_same_expression
from rl.tasks.calculations import NUMBER, calculations, share_of_calculations, without_signs
from rl.tasks.chat import ChatJsonl, Problem
from rl.types import Completion, Prompt
from rl.types.rules import SHARE, Fixed

SIGN = r"(?:(?<![\w)}])[+-])?"
FRACTION = r"\\[dtc]?frac\s*(?:\{\s*-?\d+\s*\}|\d)\s*(?:\{\s*\d+\s*\}|\d)|\d+\s*/\s*\d+"
VALUE = re.compile(rf"{SIGN}(?:{FRACTION}|{NUMBER})(?:\s*\\?%)?")
BOX = r"\\{1,8}(?:boxed|fbox)\s*\{"
TOKEN = re.compile(rf"(?P<line>####)|(?P<box>{BOX})|\\.|(?P<brace>\{{)|(?P<end>\}})", re.DOTALL)
SPACE_IN_NUMBER = re.compile(r"(?<=\d)(?:\\[,!:; ]|~)+(?=\d)")
WORD = re.compile(r"\\(?:text|mathrm|mbox)\s*\{[^{}]*\}|\\(?:quad|[,!:; ])")
PROSE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
QUESTIONS = ("question", "problem", "prompt")
ANSWERS = ("ground_truth", "answer", "solution")
"""Columns of the common sets. The first that a row has counts."""
LONGEST_VALUE = 40
DECIMALS = 6
"""Decimals of a number that count, as for math-verify."""
MOST_COMPARED = 5000
"""Number of a file's solutions that algebra compares with their answers."""


class Gsm8kJsonl(ChatJsonl):
    r"""Task of rows ``{"question": …, "answer": "… #### 42"}``; reward 1 for the answer, else 0.

    - Rows of MATH (``problem``, and ``solution`` with ``\boxed{…}``) and of DAPO-Math (``prompt``,
      and ``reward_model`` with ``ground_truth``) are read too.
    - The last mark of a text has its answer: all that a ``\boxed{…}`` holds, or the one number in
      the line after ``####``. Without a mark, it is the last number of the text.
    - Numbers are compared as numbers, and other answers by math-verify. A comparison that takes
      longer than 2 s of processor time ends, and the answer is wrong.
    - A file's solution that its own answer does not equal is named in a warning.

    Tokenizer and chat template are those of ``model.hf_path``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ChatJsonl.Config):
        instruction: str = (
            "Think step by step, then give the answer on a line of its own, as: #### NUMBER"
        )
        """Text that follows each question in the user's message."""

        partial_credit: Annotated[float, SHARE] = 0.0
        """Reward of a wrong completion that has all calculations of the row's solution, such as
        ``12 + 30``. A completion with a part of them earns that part. Results do not count, and
        a calculation may have the completion's own result of a previous one."""

        symbolic: Annotated[
            bool, Fixed(False, "algebra compares all answers that are not numbers; leave it out")
        ] = False
        """Field of older configs."""

    config: Config
    can_only_score: ClassVar[bool] = True

    def read_problems(self) -> Iterator[Problem]:
        wrong = list[str]()
        compared = 0
        credit = self.config.partial_credit
        can_earn = False
        for row in self.rows('{"question": …, "answer": …}'):
            before, question = read_question(row)
            answer, solutions = read_answer(row)
            for solution in solutions:
                final, _ = final_answer(solution, answer)
                if final == answer or compared > MOST_COMPARED:
                    continue
                compared += not (number(answer) and number(final or ""))
                if final is None or not same_value(final, answer):
                    wrong.append(f"{row.unit} {row.line} ({final} instead of {answer})")
            options = template_options(row)
            if credit:
                texts = [value for value in map(row.value.get, ANSWERS) if isinstance(value, str)]
                steps = calculations(" ; ".join(texts))
                can_earn = can_earn or bool(steps)
                parts = (f"{step} = {result}" if result else step for step, result in steps.items())
                answer = f"{', '.join(parts)} #### {answer}"
            yield Problem(
                number=row.line, question=question, answer=answer, before=before, options=options
            )
        if credit and not can_earn:
            fault = f"{self.source}: no solution has a calculation of two numbers, such as 12 + 30"
            raise ConfigError(fault, field="task.partial_credit", fix="set it to 0")
        self.warn("a solution does not have the row's answer, so that it scores 0", wrong)

    def score(self, prompt: Prompt, text: str, completion: Completion) -> Score:
        """Return the score. Metric ``answered``: the text has an answer; ``format``: the answer is
        marked by ``####`` or ``\\boxed``; ``calculations``, with ``partial_credit``: the share of
        the solution's calculations that the text has.
        """
        credit = self.config.partial_credit
        solution, reference = "", prompt.answer
        if credit:
            solution, _, reference = prompt.answer.partition(" #### ")
        answer, is_marked = final_answer(without_thoughts(text, prompt), reference)
        correct = answer is not None and same_value(answer, reference)
        metrics = {"answered": float(answer is not None), "format": float(is_marked)}
        reward = float(correct)
        if solution:
            metrics["calculations"] = share_of_calculations(solution, text)
            reward = max(reward, credit * metrics["calculations"])
        return Score(reward=reward, correct=correct, metrics=metrics)


def read_question(row: Row) -> tuple[list[dict[str, Any]], str]:
    """Return the question of a row, and the messages before it if it is the last message of a
    conversation.
    """
    name = next((name for name in QUESTIONS if name in row.value), QUESTIONS[0])
    content = row.value.get(name)
    if not isinstance(content, list):
        return [], row.text(name).strip()
    try:
        *before, last = checked_messages(usual_messages(content))
    except ConversationError as error:
        raise row.error(f"field {name!r}: {error}") from None
    if last["role"] != "user":
        raise row.error(f"field {name!r} ends with a message of {last['role']}; end it with user")
    before = [{key: turn[key] for key in turn if turn[key] not in (None, [])} for turn in before]
    return before, replace(row, value={name: last["content"]}).text(name).strip()


def read_answer(row: Row) -> tuple[str, list[str]]:
    """Return the number or expression that is the answer of a row, and the row's other texts."""
    checked = row.value.get("reward_model")
    row = replace(row, value={**row.value, **(checked if isinstance(checked, Mapping) else {})})
    texts = list[str]()
    for value in map(row.value.get, ANSWERS):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        texts += [str(value)] if is_number or isinstance(value, str) else []
    for text in texts:
        if answer := reference_answer(text):
            return answer, [other for other in texts if other.strip() and other is not text]
    name = next((name for name in ANSWERS if name in row.value), "answer")
    row.text(name)
    problem = f"field {name!r} does not end in '#### NUMBER' and has no \\boxed{{…}}"
    raise row.error(problem, fix="add the number")


def reference_answer(solution: str) -> str | None:
    """Return the answer of a solution: that of its last mark or, without a mark, all of it if it is
    a number or an expression; None for prose.
    """
    content, mark = last_mark(solution)
    if mark:
        return final_answer(solution)[0]
    short = cleaned(content)
    if number(short) is not None:
        return short.replace(",", "")
    return None if not short or "\n" in short or PROSE.search(WORD.sub("", short)) else short


def last_mark(text: str) -> tuple[str, str]:
    r"""Return what the last ``####`` or ``\boxed{…}`` of ``text`` marks, and ``"####"`` or
    ``"\boxed"``; the whole text and "" without a mark.

    A box ends at its own brace, and may hold others. A box without an end is empty.
    """
    start, end, mark = 0, len(text), ""
    opened = list[int]()
    first = re.search(rf"####|{BOX}", text)  # which takes a tenth of the time of all tokens
    for token in TOKEN.finditer(text, first.start()) if first else ():
        if token.lastgroup == "line":
            start, mark = token.end(), "####"
        elif token.lastgroup in ("box", "brace"):
            opened.append(token.end() if token.lastgroup == "box" else 0)
        elif token.lastgroup == "end" and opened and (place := opened.pop()):
            start, end, mark = place, token.start(), r"\boxed"
    if max(opened, default=0) > start:
        return "", r"\boxed"
    return text[start:].partition("\n")[0] if mark == "####" else text[start:end], mark


def final_answer(text: str, reference: str = "0") -> tuple[str | None, bool]:
    """Return the answer of ``text``, None without one, and whether it is marked.

    What a box holds is the answer. A line after ``####`` must hold exactly one number, since a list
    of guesses is not an answer, unless the line or ``reference`` is an expression. Without a mark
    the last number of the text counts.
    """
    content, mark = last_mark(text)
    if mark == r"\boxed":
        return cleaned(re.sub(BOX, "{", content)) or None, True
    if not mark and number(reference) is None:
        return (reference, False) if cleaned(content) == reference else (None, False)
    plain = without_signs(content)
    values = VALUE.findall(plain)
    rest = WORD.sub("", VALUE.sub("", plain, count=1))
    if mark and (number(reference) is None or (len(values) == 1 and re.search(r"[\\^]", rest))):
        return cleaned(content) or None, True
    if not values or (mark and len(values) > 1) or len(values[-1]) > LONGEST_VALUE:
        return None, bool(mark)
    return values[-1].replace(",", ""), bool(mark)


def same_value(answer: str, reference: str) -> bool:
    """Whether two values or expressions are equal: 0.5 is 1/2, and 42.0 is 42."""
    one, other = number(answer), number(reference)
    if one is None or other is None:
        return answer == reference or is_same_expression(answer, reference)
    if "." in answer + reference:
        one, other = ({round(value, DECIMALS) for value in both} for both in (one, other))
    return not one.isdisjoint(other)


def number(text: str) -> set[Fraction] | None:
    """Return the values of a number: one, or those of 50 and of 0.5 for ``50%``; None for other
    text.
    """
    if len(text) > LONGEST_VALUE or not VALUE.fullmatch(text):
        return None
    digits = re.sub(r"\\[dtc]?frac\s*(\{.*?\}|\d)\s*(\{.*?\}|\d)", r"\1/\2", text)
    above, *below = re.sub(r"[{},\s\\%]", "", digits).split("/")
    if below and not int(below[0]):
        return None
    value = Fraction(above) / int(below[0] if below else 1)
    return {value, value / 100} if text.endswith("%") else {value}


def cleaned(content: str) -> str:
    """Return ``content`` without what is not part of an answer: LaTeX's spaces within numbers,
    signs of a currency around a number, and the punctuation at its end.
    """
    short = SPACE_IN_NUMBER.sub("", content.replace("{,}", ",").strip())
    if not short.endswith(r"\right."):
        short = short.rstrip(" \n\t.,;:\\")
    plain = without_signs(short)
    return plain.replace(",", "") if number(plain) is not None else short
