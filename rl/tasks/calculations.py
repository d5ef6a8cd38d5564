"""Calculations that a text has, and how many of a solution's a text repeats.

It imports no other package, so that other programs can compute the same reward.
"""

import re
from itertools import product

DIGITS = r"(?:(?:\d{1,3}(?:,\d{3}){1,14}(?![\d,])|\d+)(?:\.\d+)?|(?<!\d)\.\d+)"
NUMBER = rf"{DIGITS}(?:[eE][+-]?\d{{1,3}}(?!\w))?"
CALCULATION = re.compile(
    rf"({NUMBER})\s*([-+*/x×÷]|\\times)\s*(?=({NUMBER})(?:\s*=\s*(-?{NUMBER}))?)"
)
SIGNS = {"x": "*", "×": "*", r"\times": "*", "÷": "/"}


def calculations(text: str) -> dict[str, str]:
    """Return the result that a text gives for each of its calculations of two numbers; empty if it
    gives none. Terms and factors are in the order of their digits.
    """
    results = dict[str, str]()
    for one, sign, other, result in CALCULATION.findall(without_signs(text)):
        step = _ordered(one, SIGNS.get(sign, sign), other)
        results[step] = result.replace(",", "") or results.get(step, "")
    return results


def share_of_calculations(solution: str, text: str) -> float:
    """Return the share of the solution's calculations that ``text`` has.

    Errors are carried forward: a result of the solution may be replaced by the result that ``text``
    has for the same calculation. The solution has at least one calculation.
    """
    steps = calculations(solution)
    written = calculations(text)
    results = dict[str, set[str]]()
    count = 0
    for step, result in steps.items():
        one, sign, other = step.split()
        operands = product(results.get(one, {one}), results.get(other, {other}))
        forms = {_ordered(first, sign, second) for first, second in operands}
        if found := forms & written.keys():
            count += 1
            results.setdefault(result, {result}).update(written[form] for form in found)
    return count / len(steps)


def without_signs(text: str) -> str:
    """Return ``text`` without currency signs and without LaTeX's spaces within numbers."""
    for old, new in (("\\$", ""), ("$", ""), ("{,}", ","), ("\\!", ""), ("\\,", ""), ("−", "-")):
        text = text.replace(old, new)
    return re.sub(r"^\s*([+-])\s+(?=[\d.])", r"\1", text).strip()


def _ordered(one: str, sign: str, other: str) -> str:
    numbers = [one.replace(",", ""), other.replace(",", "")]
    if sign in "+*":
        numbers.sort()
    return f" {sign} ".join(numbers)
