"""Typed functions as tools: what a policy reads, and what it gets for good and bad calls."""

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Literal

import pytest

from rl.environments import tools as module
from rl.environments.tools import Tools, code_tool
from rl.errors import ConfigError, InfrastructureError
from rl.sandbox.sandbox import Bubblewrap, Landlock, open_sandbox
from rl.sandbox.sandboxed_program import Limits, SandboxError


def add(a: int, b: int = 2) -> int:
    """Return the sum of two numbers."""
    return a + b


async def wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(0)
    return f"waited {seconds}"


def rank(names: list[str], order: Literal["up", "down"] = "up", *, title: str = "") -> list[str]:
    """Sort names."""
    return sorted(names, reverse=order == "down")


def fail() -> None:
    """Fail."""
    raise KeyError("no such thing")


def leave() -> None:
    """Leave."""
    raise SystemExit("bye")


def flood() -> str:
    """Return much text."""
    return "x" * 10**6


TOOLS = Tools([add, wait, rank, fail, leave, flood])


def test_a_schema_has_name_docstring_and_annotations():
    (schema,) = Tools([add]).schemas
    assert schema["type"] == "function"
    assert schema["function"] == {
        "name": "add",
        "description": "Return the sum of two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "default": 2}},
            "required": ["a"],
            "additionalProperties": False,
        },
    }
    properties = Tools([rank]).schemas[0]["function"]["parameters"]["properties"]
    assert properties["order"] == {"enum": ["up", "down"], "type": "string", "default": "up"}
    assert properties["title"] == {"type": "string", "default": ""}


@dataclass
class Search:
    """Search in the notes."""

    notes: list[str]

    def __call__(self, text: str, _limit: int = 9, json: bool = False) -> list[str]:
        return [note for note in self.notes if text in note][:_limit]


class Multiply:
    def __call__(self, a: int, b: int) -> int:
        """Return the product."""
        return a * b


def test_partials_and_objects_are_tools_and_parameters_have_any_name():
    tools = Tools([partial(add, b=40), Search(["one", "none"]), Multiply()])
    described = [schema["function"] for schema in tools.schemas]
    assert [(each["name"], each["description"]) for each in described] == [
        ("add", "Return the sum of two numbers."),
        ("Search", "Search in the notes."),
        ("Multiply", "Return the product."),
    ]
    assert [[*each["parameters"]["properties"]] for each in described] == [
        ["a"],
        ["text", "_limit", "json"],
        ["a", "b"],
    ]
    assert tools.call("add", {"a": 2}) == "42"
    assert "argument b: Extra inputs" in tools.call("add", {"a": 2, "b": 3})
    assert tools.call("Search", {"text": "one", "_limit": 1}) == '["one"]'
    assert "argument _limit: Input should be" in tools.call("Search", {"text": "", "_limit": "x"})
    assert tools.call("Multiply", {"a": 6, "b": 7}) == "42"


async def test_a_coroutine_function_is_called_while_an_event_loop_runs():
    assert TOOLS.call("wait", {"seconds": 1.0}) == "waited 1.0"


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        ("add", {"a": 1}, "3"),
        ("add", {"a": 1, "b": -5}, "-4"),
        ("wait", {"seconds": 2}, "waited 2.0"),
        ("rank", {"names": ["b", "ä"], "order": "down"}, '["ä", "b"]'),
    ],
)
def test_a_right_call_is_answered_with_text(name, arguments, answer):
    calls = [{"function": {"name": name, "arguments": arguments}}] * 2
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    assert TOOLS.answer(message) == [{"role": "tool", "content": answer}] * 2
    assert TOOLS.answer({"role": "assistant", "content": "42"}) == []


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("sub", {}, "there is no tool 'sub'; the tools are add, wait, rank"),
        ("add", {}, "argument a: Field required"),
        ("add", {"a": "1"}, "argument a: Input should be a valid integer, not '1'"),
        ("add", {"a": 1.5}, "argument a: Input should be a valid integer"),
        ("add", {"a": True}, "argument a: Input should be a valid integer"),
        ("add", {"a": 1, "c": 2}, "argument c: Extra inputs are not permitted"),
        ("rank", {"names": ["a", 2]}, "argument names.1: Input should be a valid string"),
        ("rank", {"names": [], "order": "left"}, "argument order: Input should be 'up' or 'down'"),
        ("fail", {}, "KeyError: 'no such thing'"),
        ("leave", {}, "SystemExit: bye"),
    ],
)
def test_a_wrong_call_is_answered_with_the_error(name, arguments, words):
    answer = TOOLS.call(name, arguments)
    assert answer.startswith("error: ")
    assert words in answer


@pytest.mark.parametrize("error", [InfrastructureError("no quota"), SandboxError("no program")])
def test_a_failure_that_is_not_the_policys_is_no_answer(error):
    def fetch() -> str:
        """Raise the error."""
        raise error

    async def fetch_later() -> str:
        """Raise the error."""
        raise error

    for tool in (fetch, fetch_later):
        with pytest.raises(type(error), match=str(error)):
            Tools([tool]).call(tool.__name__, {})


def test_a_long_answer_is_cut_off():
    answer = TOOLS.call("flood", {})
    assert answer.endswith("(cut off after 8192 of 1000000 characters)")
    assert len(answer) < 8300
    assert len(Tools([flood], max_chars=10).call("flood", {})) < 80


def untyped(a):
    """Take anything."""


def undescribed(a: int):
    return a


def starred(*values: int):
    """Take many."""


def odd(a: type(TOOLS)):
    """Take tools."""


@pytest.mark.parametrize(
    ("functions", "words"),
    [
        ([untyped], "tool 'untyped': 'a' has no type; annotate it"),
        ([undescribed], "tool 'undescribed' has no docstring"),
        ([starred], "tool 'starred' takes *values: int"),
        ([odd], "tool 'odd' has no JSON schema"),
        ([add, add], "two tools have the name 'add'"),
    ],
)
def test_a_function_that_cannot_be_described_is_refused(functions, words):
    with pytest.raises(ConfigError) as error:
        Tools(functions)
    assert words in str(error.value)


def test_a_program_of_the_policy_answers_with_its_output_its_error_and_its_limit():
    def run(code: str, **limits) -> str:
        """Return what the code tool answers, in the sandbox of this host."""
        most = Limits(**{"wall_s": 20, "cpu_s": 10, "memory_mib": 300} | limits)
        return Tools([code_tool(limits=most)]).call("python", {"code": code})

    assert run("print(sum(range(10)))\nprint('ü')") == "45\nü"
    assert run("x = 1") == "(the program printed nothing)"
    answer = run("print('so far')\n1 / 0")
    assert answer.startswith("so far\nTraceback")
    assert answer.endswith("ZeroDivisionError: division by zero\n(exit code 1)")
    assert "SyntaxError" in run("print(")
    assert "PermissionError" in run("open('/etc/passwd')")
    assert "limit of memory" in run("x = bytearray(400 << 20)")
    answer = run("import time\nprint('ok', flush=True)\ntime.sleep(60)", wall_s=3)
    assert answer.startswith("ok\n(the program ran into its limit of wall: Limits(wall_s=3,")


def test_a_host_without_a_sandbox_is_refused_unless_unsafe(monkeypatch):
    for sandbox in (Bubblewrap, Landlock):
        monkeypatch.setattr(sandbox, "complaint", lambda self: "not here")
    monkeypatch.setattr(module, "open_sandbox", open_sandbox.__wrapped__)
    with pytest.raises(ConfigError, match="no sandbox works on this host"):
        code_tool()
    assert Tools([code_tool(unsafe=True)]).call("python", {"code": "print(1)"}) == "1"
