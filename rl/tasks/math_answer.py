"""Finding the final answer in a solution, and comparing it with the reference."""

import re
from collections import deque
from functools import lru_cache

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


def reference_number(solution: str) -> str | None:
    """``"1234"`` of a solution that ends in ``#### 1,234``; None if it does not end so."""
    found = REFERENCE.search(plain(solution))
    return found[1].replace(",", "") if found else None


def final_answer(text: str) -> tuple[str | None, bool]:
    """The number or fraction that ``text`` ends up with, and whether it was marked as the answer.

    The last ``#### x`` or ``\\boxed{x}`` counts, and must hold exactly one value: a list of guesses
    is no answer. Without any mark the last value of the text counts.
    """
    text = plain(text)
    marked = next(iter(deque(MARKED.finditer(text), maxlen=1)), None)
    values = VALUE.findall(text if marked is None else marked["line"] or marked["box"] or "")
    if not values or (marked is not None and len(values) > 1) or len(values[-1]) > LONGEST_VALUE:
        return None, marked is not None
    return values[-1].replace(",", ""), marked is not None


def same_value(answer: str, reference: str) -> bool:
    """Whether two values are equal as numbers: 0.5 is 1/2, and 42.0 is 42."""
    from math_verify import verify

    # Its timeouts are signals, which only the main thread may set. Only short plain values come
    # here.
    return verify(_parse(reference), _parse(answer), timeout_seconds=None)


def plain(text: str) -> str:
    """``text`` without currency signs and LaTeX's spaces within numbers."""
    for old, new in (("\\$", ""), ("$", ""), ("{,}", ","), ("\\!", ""), ("\\,", ""), ("−", "-")):
        text = text.replace(old, new)
    return text


@lru_cache(maxsize=65536)
def _parse(value: str) -> list:
    from math_verify import parse

    return parse(f"${value}$", parsing_timeout=None)
