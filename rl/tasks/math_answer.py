"""Extraction of the final answer of a solution, and comparison with the reference."""

import re
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
