"""The code tool, in the sandbox of this host."""

import pytest

from rl.errors import ConfigError
from rl.sandbox.limits import Limits
from rl.sandbox.sandbox import Bubblewrap, Landlock, open_sandbox
from rl.tasks import code_tool as module
from rl.tasks.code_tool import code_tool
from rl.tasks.tools import Tools

TOOLS = Tools([code_tool(limits=Limits(wall_s=20, cpu_s=10, memory_mib=300))])


def run(code: str) -> str:
    return TOOLS.call("python", {"code": code})


def test_a_program_answers_with_what_it_prints():
    assert run("print(sum(range(10)))\nprint('ü')") == "45\nü"
    assert run("x = 1") == "(the program printed nothing)"


def test_the_policy_sees_the_error_of_its_program():
    answer = run("print('so far')\n1 / 0")
    assert answer.startswith("so far\nTraceback")
    assert answer.endswith("ZeroDivisionError: division by zero\n(exit code 1)")
    assert "SyntaxError" in run("print(")


def test_the_policy_sees_the_limit_of_its_program():
    assert "limit of memory" in run("x = bytearray(400 << 20)")
    brief = Tools([code_tool(limits=Limits(wall_s=1, cpu_s=10))])
    answer = brief.call("python", {"code": "import time\nprint('ok', flush=True)\ntime.sleep(60)"})
    assert answer.startswith("ok\n(the program ran into its limit of wall: Limits(wall_s=1,")


def test_a_program_reaches_no_file_and_no_network():
    assert "PermissionError" in run("open('/etc/passwd')")
    program = "import socket\nsocket.create_connection(('127.0.0.1', 9))"
    assert "Error" in run(program) and "exit code 1" in run(program)


def test_a_host_without_a_sandbox_is_refused_unless_unsafe(monkeypatch):
    for sandbox in (Bubblewrap, Landlock):
        monkeypatch.setattr(sandbox, "complaint", lambda self: "not here")
    monkeypatch.setattr(module, "open_sandbox", open_sandbox.__wrapped__)
    with pytest.raises(ConfigError, match="no sandbox works on this host"):
        code_tool()
    assert Tools([code_tool(unsafe=True)]).call("python", {"code": "print(1)"}) == "1"
