"""Right and wrong answers of problems, and the limit of a comparison."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from rl.tasks import algebra
from rl.tasks.algebra import is_same_expression
from rl.tasks.gsm8k_jsonl import Gsm8kJsonl, final_answer, reference_answer, same_value
from rl.types import Completion, Prompt
from tests.kit.tables import check_rows


@pytest.mark.parametrize(
    ("text", "answer", "marked"),
    [
        ("5 + 3 = 8\n#### 8", "8", True),
        ("#### 8\nwait\n#### 9", "9", True),
        ("#### $1,234.50.", "1234.50", True),
        ("#### -7 apples", "-7", True),
        ("#### - 7", "-7", True),
        (r"so \boxed{42}", "42", True),
        (r"so $\boxed{\$1{,}234}$ in all", "1234", True),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", True),
        (r"#### \boxed{x = 3}", "x = 3", True),
        (r"#### 5 and then \boxed{6}", "6", True),
        (r"\boxed{5} and then #### 6", "6", True),
        (r"\boxed{\boxed{5}}", "{5}", True),
        (r"so \fbox {5}", "5", True),
        (r"so \\boxed{5}", "5", True),
        (r"\boxed{5} or }{ \boxed{6", None, True),
        (r"\boxed{ \boxed{5} and", "5", True),
        (r"\boxed{\left\{ x \right.} .", r"\left\{ x \right.", True),
        (r"\boxed{}", None, True),
        (r"\boxed{\sqrt{\frac{1}{2}}}" + "." * 5000, r"\sqrt{\frac{1}{2}}", True),
        ("#### 50%", "50%", True),
        ("#### 41 or 42", None, True),
        ("#### dunno, was it 3?\n", "3", True),
        ("#### none", None, True),
        ("8 of them #### ", None, True),
        (r"#### \sqrt{2}", r"\sqrt{2}", True),
        (r"#### 18 \text{ apples}", "18", True),
        ("it makes 5 and 3/4", "3/4", False),
        ("from 10-7 it is .5", ".5", False),
        ("5 - 3 = 2.", "2", False),
        ("no number at all", None, False),
        ("9" * 5000, None, False),
        ("", None, False),
    ],
)
def test_the_last_answer_counts(text, answer, marked):
    assert final_answer(text) == (answer, marked)


RIGHT = r"""
45 = 45^\circ              \frac12 = 0.5                -\frac{1}{2} = \frac{-1}{2}
1000 = 1,000               1\,000\,000 = 1000000        5\text{ cm}^2 = 5\text{ cm}^2
[0,1) = [0, 1)             \text{Evelyn} = Evelyn       70\% = 0.7
3 = \sqrt{9}               6 = x=6                      \$18.90 = 18.90
1000 = 10^3                5 = 5\text{ cm}              \frac32 = 1\frac12
0.5 = 50\%                 1/2 = \frac{ 1 }{ 2 }        \frac{14}{3} = \frac{14}3
\dfrac{1}{2} = \tfrac12    2\pi = 2 \pi                 \{1,2\} = \{2, 1\}
1,2 = 2, 1                 (3,\frac{1}{2}) = (3, 0.5)   x=5 = 5
1500 = 1.5 \times 10^3     1500 = 1.5e3                 -7 = - 7
18 = 18.                   18 = 18.0                    (0,\infty) = (0, +\infty)
90 = 90\text{ degrees}     x \in [0,1] = [0,1]          x(x+1) = x^2 + x
\sqrt{12} = 2\sqrt3        y=2x+3 = y=3+2x              x>3 = 3<x
5 = \boxed{5}              5 = \mathbf{5}               5 = \displaystyle 5
1024 = 2^{10}              1+2i = 2i+1                  \frac{\sqrt{3}}{2} = \sqrt{3}/2
1{,}234 = 1234             \text{(A)} = A               3 \pm \sqrt{2} = 3 \pm \sqrt2
0.333333 = \frac13         10\text{ m/s} = 10           \frac{\frac{1}{2}}{\sqrt{2}} = 1/2/\sqrt{2}
\begin{pmatrix}1&2\\3&4\end{pmatrix} = \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
(-\infty,-2)\cup(2,\infty) = (2,\infty)\cup(-\infty,-2)
"""
WRONG = r"""
2 = \sqrt{2}               2 = 2x                       5 = 5!
2 = \frac{1}{\sqrt{2}}     12 = \frac12                 2 = -\sqrt{2}
3 = 3i                     7 = (7, \infty)              7 = \text{not } 7
7 = - 7                    7 = -\;7                     1 = e^{1}
2 = 2\pi                   2 = x^2                      3 = \frac{14}3
(1,2) = (2,1)              1, 2 = 1                     [0,1] = (0,1)
\pi = 3.14                 \frac13 = 0.33               x>3 = x<3
\text{odd} = \text{even}   7 = 7 \text{ or } 8          5 = 5 \text{ or } \boxed{6}
12 = 1\frac12              p-q = q-p                    i = -i
1/42 = 1/0                 42 = 4.2                     x=5 = y=6
\begin{pmatrix}1&2\\3&4\end{pmatrix} = \begin{pmatrix} 1 & 2 \\ 3 & 5 \end{pmatrix}
"""


def scores(reference, text):
    task = object.__new__(Gsm8kJsonl)
    task.config = Gsm8kJsonl.Config()
    prompt = Prompt(prompt_id=0, tokens=[1], text="?", answer=reference_answer(reference))
    return task.score(prompt, text, Completion.written([1])).correct


@pytest.mark.parametrize(("table", "is_right"), [(RIGHT, True), (WRONG, False)])
def test_all_of_a_box_is_compared_by_algebra(table, is_right):
    def pairs(table):
        for line in table.strip().splitlines():
            for cell in line.split("   "):
                if cell.strip():
                    yield tuple(map(str.strip, cell.strip().split(" = ", maxsplit=1)))

    def check(pair):
        reference, answer = (rf"\boxed{{{each}}}" for each in pair)
        assert scores(reference, f"So ${answer}$.") == is_right
        assert scores(reference, f"As known:\n{reference}")

    check_rows(pairs(table), check)


@pytest.mark.parametrize(
    ("answers", "is_same"),
    [
        (["42", "42.0", "042", "84/2", r"\frac{84}{2}", "+42", "4.2e1", "42%"], True),
        (["43", "-42", "42.01", "1/42", "0.42", r"\frac{4}2"], False),
    ],
)
def test_numbers_are_compared_without_another_process(monkeypatch, answers, is_same):
    monkeypatch.setattr(algebra, "_comparer", None)
    assert [same_value(answer, "42") for answer in answers] == [is_same] * len(answers)


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("so\n#### 1,234", "1234"),
        ("#### -5 ", "-5"),
        ("#### $0.5", "0.5"),
        ("#### 18.", "18"),
        ("#### 50%", "50%"),
        ("#### 1/2", "1/2"),
        ("#### +5", "+5"),
        ("18.", "18"),
        ("50%", "50%"),
        ("+5", "+5"),
        ("x^2+1", "x^2+1"),
        (r"\frac{\sqrt3}{2}", r"\frac{\sqrt3}{2}"),
        ("5 or 6", None),
        ("It is five.", None),
        ("#### five or 6 or 7", None),
    ],
)
def test_a_reference_is_read_as_an_answer_is(solution, answer):
    assert reference_answer(solution) == answer
    assert answer is None or scores(solution, solution)


ENDLESS = (r"(1+x)^{9999}", r"\cos(x)^{2000}", "9^{9^{9^9}}", "(" * 3000)


def test_an_answer_that_algebra_would_compute_for_hours_is_wrong():
    def check(expression):
        assert not scores(r"\boxed{x^2+1}", rf"\boxed{{{expression}}}")
        assert scores(r"\boxed{x^2+1}", r"\boxed{1+x^2}")

    check_rows(ENDLESS, check)


def test_answers_are_compared_in_threads_and_after_a_fork():
    with ThreadPoolExecutor(3) as threads:
        answers = threads.map(
            is_same_expression, ["17.50", r"\sqrt{4}", "x"] * 8, ["35/2", "2", "y"] * 8
        )
        assert [*answers] == [True, True, False] * 8
    child = os.fork()
    if child == 0:
        os._exit(42 if is_same_expression("x+x", "2x") else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    assert is_same_expression("x+y", "y+x")


def test_the_process_that_compares_is_replaced_when_it_is_lost():
    assert is_same_expression("x+x", "2x")
    process, _ = algebra._comparer(os.getpid())
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not is_same_expression(ENDLESS[0], "x")
    assert is_same_expression("x+x", "2x")
