"""Programs run on a server or in a container, and a server that fails gives no result."""

import base64
import json
import os
import stat
import subprocess
import sys
from contextlib import contextmanager

import pytest

from rl.environments.tools import Tools, code_tool
from rl.errors import ConfigError, InfrastructureError
from rl.sandbox import elsewhere as module
from rl.sandbox.elsewhere import CircuitBreaker, ContainerSandbox, RemoteSandbox, sandbox_at
from rl.sandbox.sandbox import open_sandbox
from rl.sandbox.sandboxed_program import Limits
from tests.kit.servers import Handler, Server, serving

LONG = Limits(wall_s=60, cpu_s=20)


class Fusion(Server):
    """Server of SandboxFusion's protocol, which fails as ``faults`` say and then runs programs."""

    def __init__(self):
        super().__init__(Programs)
        self.faults: list[int | bytes] = []
        self.asked = 0


class Programs(Handler):
    def do_POST(self):
        self.server.asked += 1
        order = json.loads(self.body())
        fault = self.server.faults.pop(0) if self.server.faults else None
        body = fault if isinstance(fault, bytes) else json.dumps(self._run(order)).encode()
        self.send_response(fault if isinstance(fault, int) else 200)
        self.end_headers()
        self.wfile.write(body)

    def _run(self, order):
        assert self.path == "/run_code" and order["language"] == "python"
        files = {name: base64.b64decode(text).decode() for name, text in order["files"].items()}
        limits = Limits(wall_s=order["run_timeout"], memory_mib=order["memory_limit_MB"])
        done = open_sandbox().run(order["code"], files=files, stdin=order["stdin"], limits=limits)
        late = done.limit == "wall"
        result = {
            "status": "TimeLimitExceeded" if late else "Error" if done.exit_code else "Finished",
            "execution_time": None if late else done.seconds,
            "return_code": None if late else done.exit_code,
            "stdout": done.stdout,
            "stderr": done.stderr,
        }
        return {"status": "Success", "message": "", "run_result": result}


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(module, "PAUSE_S", 0.0)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving(Fusion()) as server:
        yield server


CODE = """
import other, sys
print("ü", other.x, sys.stdin.read())
print("e", file=sys.stderr)
sys.exit(7)
"""


def test_a_program_on_a_server_has_files_input_outputs_and_an_exit_code(server):
    sandbox = RemoteSandbox(f"{server.url}/")
    result = sandbox.run(CODE, limits=LONG, files={"other.py": "x = 5"}, stdin="in")
    assert (result.exit_code, result.limit) == (7, None)
    assert (result.stdout, result.stderr) == ("ü 5 in\n", "e\n")
    assert result.seconds > 0
    late = sandbox.run("while True: pass", limits=Limits(wall_s=0.5))
    assert (late.exit_code, late.limit) == (-9, "wall")
    much = sandbox.run("print('é' * 50)", limits=Limits(wall_s=60, cpu_s=20, output_bytes=9))
    assert (much.stdout, much.limit) == ("éééé\ufffd", "output")


@pytest.mark.parametrize(
    "faults", [[500, 503], [429, 408], [b"", b'{"status": "SandboxError"}']], ids=str
)
def test_a_request_that_fails_is_made_again(server, faults):
    server.faults = faults
    assert RemoteSandbox(server.url).run("print(1)", limits=LONG).stdout == "1\n"
    assert server.asked == 3


@pytest.mark.parametrize(
    ("faults", "asked", "said"),
    [
        ([500] * 3, 3, "failed 3 times: it answered 500 Internal Server Error"),
        ([401], 1, "failed 1 times: it answered 401 Unauthorized"),
        ([b'{"detail": "no"}'] * 3, 3, "failed 3 times: it answered {'detail': 'no'}"),
    ],
    ids=["error", "refusal", "another protocol"],
)
def test_a_server_that_fails_is_no_failure_of_the_program(server, faults, asked, said):
    server.faults = faults
    with pytest.raises(InfrastructureError, match=said):
        RemoteSandbox(server.url).run("print(1)", limits=LONG)
    assert server.asked == asked


def test_a_server_that_fails_again_and_again_is_left_alone_for_a_while(server, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    breaker = CircuitBreaker("it", failures=2, rest_s=30.0)
    sandbox = RemoteSandbox(server.url, breaker)

    def fails(said):
        with pytest.raises(InfrastructureError, match=said):
            sandbox.run("print(1)", limits=LONG)
        return server.asked

    server.faults = [401] * 3
    assert [fails("401"), fails("401")] == [1, 2]
    now[0] = 10.0
    assert fails("it failed 2 times in a row; it is asked again in 20 s") == 2
    now[0] = 31.0
    assert fails("401") == 3
    assert fails("it failed 3 times in a row; it is asked again in 30 s") == 3
    now[0] = 62.0
    breaker.check()  # the one call that may try
    with pytest.raises(InfrastructureError):
        breaker.check()
    breaker.count(failed=False)
    assert sandbox.run("print(1)", limits=LONG).stdout == "1\n"


def test_a_code_tool_answers_from_the_server_and_raises_if_it_is_lost(server):
    tools = Tools([code_tool(at=server.url, limits=LONG)])
    assert tools.call("python", {"code": "print(6 * 7)"}) == "42"
    server.faults = [500] * 3
    with pytest.raises(InfrastructureError):
        tools.call("python", {"code": "print(6 * 7)"})


def test_a_place_that_is_no_sandbox_is_refused(monkeypatch):
    assert sandbox_at("http://a:1") is sandbox_at("http://a:1")
    for place in ("ftp://a", "docker:", "here"):
        with pytest.raises(ConfigError, match=f"'{place}' is not a sandbox; write a URL, such as"):
            sandbox_at(place)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="podman is not installed"):
        sandbox_at("podman:python:3.12")


ENGINE = """#!{python}
import os, sys, tempfile
with open({log!r}, "a") as log:
    print(*sys.argv[1:], file=log)
if sys.argv[1] == "kill":
    sys.exit(0)
if "broken" in sys.argv:
    sys.exit("no such image")
with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    at = sys.argv.index("python3")
    sys.exit(os.spawnv(os.P_WAIT, sys.executable, ["python3", *sys.argv[at + 1 :]]))
"""


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """Program in place of ``docker`` that runs a container's command in a folder."""
    log = tmp_path / "log"
    path = tmp_path / "docker"
    path.write_text(ENGINE.format(python=sys.executable, log=str(log)))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return log


def check_programs(sandbox):
    result = sandbox.run(CODE, limits=LONG, files={"other.py": "x = 5"}, stdin="in")
    assert (result.exit_code, result.limit) == (7, None)
    assert (result.stdout, result.stderr) == ("ü 5 in\n", "e\n")
    late = sandbox.run("import time; print(1, flush=True); time.sleep(9)", limits=Limits(wall_s=2))
    assert (late.exit_code, late.limit, late.stdout) == (-9, "wall", "1\n")
    much = sandbox.run("print('a' * 50)", limits=Limits(wall_s=60, cpu_s=20, output_bytes=9))
    assert (much.stdout, much.limit) == ("a" * 9, "output")


def test_a_container_gets_the_program_and_has_no_rights(engine):
    check_programs(ContainerSandbox("docker", "python:3.12-slim"))
    given = engine.read_text()
    for option in (
        "--network none",
        "--read-only",
        "--cap-drop ALL",
        "--security-opt no-new-privileges",
        "--user 65534:65534",
        "--memory 512m --memory-swap 512m",
        "--pids-limit 18",
    ):
        assert option in given


def test_a_container_that_cannot_start_is_no_failure_of_the_program(engine):
    with pytest.raises(InfrastructureError, match="docker run failed: no such image"):
        ContainerSandbox("docker", "broken").run("print(1)", limits=LONG)
    assert engine.read_text().splitlines()[-1].startswith("kill tiller-")


@contextmanager
def needed(engine: str):
    """Skip the test if no container of the engine can start here."""
    command = [engine, "run", "--rm", "python:3.12-slim", "true"]
    try:
        subprocess.run(command, capture_output=True, check=True, timeout=300)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"{engine} starts no container here: {error}")
    yield


@pytest.mark.long
@pytest.mark.download
@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_programs_run_in_real_containers(engine):
    with needed(engine):
        sandbox = ContainerSandbox(engine, "python:3.12-slim")
        check_programs(sandbox)
        code = "import socket; socket.create_connection(('1.1.1.1', 53), 2)"
        assert "unreachable" in sandbox.run(code, limits=LONG).stderr
