"""Task of programming puzzles with unit tests, in a form of its own or of HumanEval or MBPP."""

import ast
import builtins
import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from textwrap import dedent
from typing import Annotated, Any, ClassVar

from markdown_it import MarkdownIt

from rl.data.jsonl import Row, tell_progress
from rl.dialects.answers import without_thoughts
from rl.environments.task import Score
from rl.errors import shown
from rl.sandbox.sandbox import Sandbox, open_sandbox
from rl.sandbox.sandboxed_program import Limits
from rl.tasks.chat import CHUNK, ChatJsonl, Problem
from rl.types import Completion, Prompt
from rl.types.rules import above, at_least

PROGRAMS = Path(__file__).parent / "puzzles"
FENCES = MarkdownIt("zero").enable(["fence", "list", "blockquote"])
TAG = re.compile(r"\W*(?:(?:i?python|py)[\d.]*(?::\S*|\W*))?(?:\s|$)", re.IGNORECASE)
SOLUTIONS = ("canonical_solution", "code", "solution")
"""Columns with the own solution of a row."""
MOST_TRIED = 1000
"""Number of first rows whose own solutions run."""
FORM = '{"instruction": …, "tests": ["assert …", …]}'
OWN_NAMES = {*dir(builtins), "__name__", "__builtins__"}


class PythonPuzzles(ChatJsonl):
    """Task of rows ``{"instruction": …, "tests": ["assert add(1, 2) == 3", …]}``.

    A test is a Python program, in which coroutines may be awaited, and passes if it raises nothing.
    Rows of HumanEval (``prompt``, the begin of a program, with ``test`` and ``entry_point``) and of
    MBPP (``text`` or ``prompt``, and ``test_list``) are read too. A solution follows the begin of
    the program.

    The reward is the share of the tests that the last block of Python code of the completion
    passes. Rows whose own solution (``canonical_solution``, ``code`` or ``solution``) does not pass
    their tests are named in a warning, with the reason.

    Tokenizer and chat template are those of ``model.hf_path``.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ChatJsonl.Config):
        instruction: str = (
            "Answer with one Markdown code block of Python that holds the whole solution."
        )
        """Text that follows each instruction in the user's message."""

        all_or_nothing: bool = False
        """Whether the reward is 1 if all tests pass, else 0, instead of the share that pass."""

        seconds: Annotated[float, above(0, 3600)] = 5.0
        """Time for all tests of one completion. Tests that did not end by then count as failed."""

        memory_mib: Annotated[int, at_least(64, 10**6)] = 512
        """Memory of a solution, in MiB."""

        unsafe: bool = False
        """Whether solutions run without a sandbox on a host where none works. They can then read
        and change whatever the run can."""

    config: Config
    can_only_score: ClassVar[bool] = True

    def __init__(self, config: Config, **options: Any):
        self.sandbox = open_sandbox(unsafe=config.unsafe)
        super().__init__(config, **options)

    def read_problems(self) -> Iterator[Problem]:
        failed = list[str]()
        rows = enumerate(self.rows(FORM))
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            while chunk := [*islice(rows, CHUNK)]:
                tell_progress(f"ran solutions of {chunk[0][0]} rows of {self.source}")
                for problem, reason in threads.map(self._read, chunk):
                    failed += [reason] if reason else []
                    yield problem
        self.warn("solutions of some rows do not pass the tests of their own rows", failed)

    def _read(self, numbered: tuple[int, Row]) -> tuple[Problem, str]:
        """Return the problem of a row, and why the row's own solution does not pass its tests.

        If the solution passes them only when calls that return something may change lists of the
        tests in place, they may do so for all solutions of this row.
        """
        number, row = numbered
        question, *answer = read_puzzle(row)
        solution = next(filter(None, map(row.value.get, SOLUTIONS)), None)
        reason = ""
        if isinstance(solution, str) and number < MOST_TRIED:
            code = last_block(solution) or solution
            verdicts, said = self._run(code, answer)
            if not all(verdicts):
                changing = [test if isinstance(test, str) else (*test, True) for test in answer]
                if all(self._run(code, changing)[0]):
                    answer = changing
                else:
                    reason = f"{row.unit} {row.line}: {said}"
        return Problem(number=row.line, question=question, answer=json.dumps(answer)), reason

    def score(self, prompt: Prompt, text: str, completion: Completion) -> Score:
        """Return the score. Metric ``answered``: the text has a block of code; ``passed``: share of
        the tests that pass.

        Raises SandboxError if the sandbox fails, which drops the group.
        """
        code = last_block(without_thoughts(text, prompt))
        tests = json.loads(prompt.answer)
        passed = sum(self._run(code, tests)[0]) if code is not None else 0
        count = sum(isinstance(test, list) for test in tests)
        share = passed / count
        correct = passed == count
        return Score(
            reward=float(correct) if self.config.all_or_nothing else share,
            correct=correct,
            metrics={"answered": float(code is not None), "passed": share},
        )

    def _run(self, code: str, tests: list[Any]) -> tuple[list[bool], str]:
        """Return what :func:`run_tests` does for the tests of a row, after the begin of the
        solution if the row gives one.
        """
        limits = Limits(
            wall_s=self.config.seconds,
            cpu_s=max(1, round(self.config.seconds)),
            memory_mib=self.config.memory_mib,
        )
        begin = tests[0] if isinstance(tests[0], str) else ""
        return run_tests(self.sandbox, begin + code, tests[bool(begin) :], limits)


def last_block(text: str) -> str | None:
    """Return the last block of Python code: the last fenced block that is tagged as Python, or else
    the last one without a tag that defines something, or else the last one without a tag; None
    without any. A block without an end does not count.
    """
    untagged = list[str]()
    for block in reversed(FENCES.parse(f"{text}\n")):
        lines = block.content.count("\n") + 2
        if block.type != "fence" or not block.map or block.map[1] - block.map[0] != lines:
            continue
        if (tag := TAG.match(block.info)) and tag[0].strip():
            return block.content
        untagged += [block.content] if tag else []
    return next(filter(defines, untagged), next(iter(untagged), None))


def defines(code: str) -> bool:
    """Whether ``code`` is Python that does more than name values, as printed output may do."""
    try:
        return any(not isinstance(node, ast.Expr) for node in ast.parse(dedent(code)).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def run_tests(
    sandbox: Sandbox, code: str, tests: Sequence[tuple[Any, ...]], limits: Limits
) -> tuple[list[bool], str]:
    """Return for each test whether ``code`` passes it, and why the first that failed did.

    Code and tests run in two sandboxes, so that the code sees no test and no expected value, and
    what it returns reaches the tests as data. The tests are one after another; if one does not
    end within ``limits``, the rest fails.

    Args:
        tests: Programs, each after the names of ``code`` that it uses. If True follows, a call
            that returns something may change the lists, sets and dicts that it is given.
    """
    plain = (PROGRAMS / "plain.py").read_text()
    from_solver, to_judge, from_judge, to_solver = ends = [*os.pipe(), *os.pipe()]
    with contextlib.ExitStack() as stack:
        report = os.memfd_create("report")
        stack.callback(os.close, report)
        try:
            solver = sandbox.start(
                (PROGRAMS / "solver.py").read_text(),
                limits=limits,
                files={"plain.py": plain, "solution": code, "pipes": f"{from_judge} {to_judge}"},
                fds=[from_judge, to_judge],
            )
            stack.enter_context(solver)
            judge = sandbox.start(
                (PROGRAMS / "judge.py").read_text(),
                limits=limits,
                files={"plain.py": plain},
                stdin=json.dumps([[from_solver, to_solver, report], tests]),
                fds=[from_solver, to_solver, report],
            )
            stack.enter_context(judge)
        finally:
            for end in ends:
                os.close(end)
        solver.ready()
        said = judge.wait(beside=[solver]).stderr.partition("\n")[0]
        verdicts = os.pread(report, len(tests), 0)
    reason = said if len(verdicts) == len(tests) else f"no end within {limits.wall_s:g} s"
    return [verdicts[at : at + 1] == b"1" for at in range(len(tests))], reason


def read_puzzle(row: Row) -> list[Any]:
    """Return the question of a line, the begin of a solution if the row gives one, and the tests,
    each after the names of a solution that it uses.

    Raises ConfigError as :func:`read_tests` does.
    """
    if "entry_point" in row.value:  # HumanEval
        begin = row.text("prompt")
        test = f"{row.text('test')}\ncheck({row.text('entry_point')})"
        question = f"Complete this program.\n```python\n{begin.strip()}\n```"
        return [question, f"{begin}\n", *read_tests(row, [test])]
    if "test_list" not in row.value:
        return [row.text("instruction").strip(), *read_tests(row, row.value.get("tests"))]
    # MBPP, whose tests use modules that the solution imports
    setup = [row.value.get("test_setup_code") or "", *(row.value.get("test_imports") or [])]
    tests = [*map(str, row.value["test_list"] or [])]
    modules = sorted({*re.findall(r"\b(\w+)\.\w", str(tests))} & sys.stdlib_module_names)
    head = "\n".join([*setup, *(f"import {module}" for module in modules)]).strip()
    question = row.text("text" if "text" in row.value else "prompt").strip()
    checks = read_tests(row, [f"{head}\n{test}".strip() for test in tests])
    return ["\n".join([question, "The code should pass these tests:", *tests]), *checks]


def read_tests(row: Row, tests: Any) -> list[tuple[list[str], str]]:
    """Return the tests of a line, each after the names of a solution that it uses.

    Raises ConfigError if a test is not valid Python, or uses nothing of a solution.
    """
    if not isinstance(tests, list) or not tests or not all(isinstance(text, str) for text in tests):
        raise row.error(f"field 'tests' is {shown(tests)}; write a list of Python programs")
    read = []
    for number, test in enumerate(tests):
        try:
            names = free_names(test)
        except (SyntaxError, ValueError) as error:
            raise row.error(f"test {number} is not valid Python: {error}") from None
        modules = names & sys.stdlib_module_names
        if modules:
            raise row.error(f"test {number} uses {min(modules)}; have the test import it")
        if not names:
            raise row.error(f"test {number} uses nothing that a solution defines")
        read.append((sorted(names), test))
    return read


def free_names(code: str) -> set[str]:
    """Return the names that a program uses and defines nowhere."""
    used = set[str]()
    defined = set[str](OWN_NAMES)
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            defined.add(node.name)
    return used - defined
