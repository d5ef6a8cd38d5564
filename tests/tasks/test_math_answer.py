from concurrent.futures import ThreadPoolExecutor

import pytest

from rl.tasks.gsm8k_jsonl import final_answer, reference_number, same_value


@pytest.mark.parametrize(
    ("text", "answer", "marked"),
    [
        ("5 + 3 = 8\n#### 8", "8", True),
        ("#### 8\nwait\n#### 9", "9", True),
        ("#### $1,234.50.", "1234.50", True),
        ("#### -7 apples", "-7", True),
        (r"so \boxed{42}", "42", True),
        (r"so $\boxed{\$1{,}234}$ in all", "1234", True),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", True),
        (r"#### \boxed{x = 3}", "3", True),
        (r"#### 5 and then \boxed{6}", "6", True),
        ("#### 50%", "50", True),
        ("#### 41 or 42", None, True),
        ("#### dunno, was it 3?\n", "3", True),
        ("#### none", None, True),
        ("8 of them #### ", None, True),
        ("it makes 5 and 3/4", "3/4", False),
        ("from 10-7 it is .5", ".5", False),
        ("5 - 3 = 2.", "2", False),
        ("no number at all", None, False),
        ("9" * 5000, None, False),
        ("", None, False),
    ],
)
def test_the_last_answer_counts(text, answer, marked):
    found, was_marked = final_answer(text)
    assert was_marked == marked
    assert (found or "").replace(" ", "") == (answer or "")


def test_powers_and_factorials_never_reach_the_algebra():
    for text in (r"\boxed{9^{9^{9^{9}}}}", r"#### 99999999!!!", "#### 10**10**10"):
        answer, _ = final_answer(text)
        assert answer is None or answer.isdigit()


@pytest.mark.parametrize(
    ("answers", "is_same"),
    [
        (["42", "42.0", "042", "84/2", r"\frac{84}{2}"], True),
        (["43", "-42", "42.01", "1/42", "42/0", "0.42"], False),
    ],
)
def test_numbers_are_compared_however_they_are_written(answers, is_same):
    assert [same_value(answer, "42") for answer in answers] == [is_same] * len(answers)


def test_answers_can_be_compared_outside_the_main_thread():
    with ThreadPoolExecutor(3) as threads:
        assert [*threads.map(same_value, ["17.50"] * 3, ["35/2"] * 3)] == [True] * 3


@pytest.mark.parametrize(
    ("solution", "number"),
    [
        ("so\n#### 1,234", "1234"),
        ("#### -5 ", "-5"),
        ("#### $0.5", "0.5"),
        ("#### 5 apples", None),
        ("5", None),
    ],
)
def test_a_reference_ends_in_its_number(solution, number):
    assert reference_number(solution) == number
