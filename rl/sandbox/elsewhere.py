"""Sandboxes elsewhere: a server of programs over HTTP, and containers of Docker or Podman."""

import base64
import json
import secrets
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from rl.errors import InfrastructureError, error_text, is_temporary, require, shown
from rl.sandbox.sandboxed_program import START_S, Limit, Limits, Result

TRIES = 3
PAUSE_S = 1.0
"""Pause before the second try; it doubles for each later one."""
NO_LIMITS = Limits()
Ended = tuple[int, str, str, bool, float]
"""Exit code, outputs, whether the time was exceeded, and seconds."""
SUPERVISOR = """
import json, os, subprocess, sys, time
orders = json.loads(sys.stdin.readline())
for name, text in orders["files"].items():
    open(name, "w", encoding="utf-8", newline="").write(text)
with open(".out", "w+b") as out, open(".err", "w+b") as err:
    command = [sys.executable, "program.py"]
    began, late = time.monotonic(), False
    program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=err)
    try:
        program.communicate(orders["stdin"].encode(), timeout=orders["wall_s"])
    except subprocess.TimeoutExpired:
        late = True
        program.kill()
        program.wait()
    seconds = time.monotonic() - began
    texts = []
    for file in (out, err):
        file.seek(0)
        texts.append(file.read(orders["most"] + 1).decode(errors="replace"))
print(json.dumps([program.returncode, *texts, late, seconds]))
"""
"""Program of a container: it runs the program of its standard input within the time."""


class ElsewhereSandbox(ABC):
    """Runs untrusted Python programs outside of this host's sandbox, as
    :meth:`rl.sandbox.sandbox.Sandbox.run` does.

    A failure that is not the program's raises InfrastructureError, which costs the group of an
    episode: no reward is made of it.
    """

    def run(
        self,
        code: str,
        *,
        limits: Limits = NO_LIMITS,
        files: Mapping[str, str] | None = None,
        stdin: str = "",
    ) -> Result:
        """Run ``code`` and return its result. May be called in any thread."""
        exit_code, stdout, stderr, late, seconds = self._run(code, limits, files or {}, stdin)
        outputs = (stdout, stderr)
        texts = [text.encode()[: limits.output_bytes].decode(errors="replace") for text in outputs]
        is_cut = any(len(text.encode()) > limits.output_bytes for text in outputs)
        limit: Limit | None = "wall" if late else "output" if is_cut else None
        return Result(
            exit_code=exit_code, stdout=texts[0], stderr=texts[1], limit=limit, seconds=seconds
        )

    @abstractmethod
    def _run(self, code: str, limits: Limits, files: Mapping[str, str], stdin: str) -> Ended:
        """Run ``code`` without the limit of ``output_bytes``."""


@dataclass(eq=False)
class CircuitBreaker:
    """Refuses calls of a server that fails, so that nothing waits for it again and again.

    After ``failures`` calls in a row that failed, calls are refused for ``rest_s`` seconds. Then
    one call may try; the others are refused until it succeeds.
    """

    name: str
    failures: int = 5
    rest_s: float = 30.0
    _failed: int = 0
    _until: float = 0.0
    _mutex: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def check(self) -> None:
        """Return if a call may be made. Raises InfrastructureError otherwise."""
        with self._mutex:
            now = time.monotonic()
            if self._failed >= self.failures and now < self._until:
                rest = self._until - now
                problem = f"{self.name} failed {self._failed} times in a row"
                raise InfrastructureError(f"{problem}; it is asked again in {rest:.0f} s")
            self._until = now + self.rest_s

    def count(self, *, failed: bool) -> None:
        """Count the end of a call."""
        with self._mutex:
            self._failed = self._failed + 1 if failed else 0
            self._until = time.monotonic() + self.rest_s


class RemoteSandbox(ElsewhereSandbox):
    """Programs on a server with the protocol of SandboxFusion: ``POST /run_code``.

    A request that fails is made again, at most TRIES times; programs have no effects outside of
    their sandbox. Of the limits, the server gets ``wall_s`` and ``memory_mib``. ``output_bytes``
    holds here, and the others are the server's.
    """

    def __init__(self, url: str, breaker: CircuitBreaker | None = None):
        self.url = url.rstrip("/")
        self._breaker = breaker or CircuitBreaker(f"the sandbox at {self.url}")

    def _run(self, code: str, limits: Limits, files: Mapping[str, str], stdin: str) -> Ended:
        order = {
            "code": code,
            "language": "python",
            "run_timeout": limits.wall_s,
            "memory_limit_MB": limits.memory_mib,
            "stdin": stdin,
            "files": {
                name: base64.b64encode(text.encode()).decode() for name, text in files.items()
            },
        }
        self._breaker.check()
        try:
            answer = self._asked(json.dumps(order).encode(), limits.wall_s + START_S)
        except InfrastructureError:
            self._breaker.count(failed=True)
            raise
        self._breaker.count(failed=False)
        done = answer["run_result"]
        late = done["status"] == "TimeLimitExceeded"
        exit_code = done.get("return_code")
        exit_code = -9 if exit_code is None else exit_code
        return exit_code, done["stdout"], done["stderr"], late, done.get("execution_time") or 0.0

    def _asked(self, body: bytes, wait_s: float) -> dict[str, Any]:
        """Return the answer to a request. Raises InfrastructureError after the last try."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/run_code", body, headers)
        for number in range(TRIES):
            if number:
                time.sleep(PAUSE_S * 2 ** (number - 1))
            try:
                with urllib.request.urlopen(request, timeout=wait_s) as response:
                    answer = json.load(response)
                if isinstance(answer, dict) and isinstance(answer.get("run_result"), dict):
                    return answer
                problem = f"it answered {shown(answer)}"
            except urllib.error.HTTPError as error:
                problem = f"it answered {error.code} {error.reason}"
                if not is_temporary(error.code):
                    break
            except (OSError, ValueError) as error:
                problem = error_text(error)
        raise InfrastructureError(f"the sandbox at {self.url} failed {number + 1} times: {problem}")


def call_engine(*command: str, wait_s: float, stdin: bytes = b"") -> str:
    """Return what a command of Docker or Podman prints. Raises InfrastructureError if it fails or
    takes longer than ``wait_s`` seconds.
    """
    extra: dict[str, Any] = {"input": stdin, "timeout": wait_s, "check": True}
    try:
        return subprocess.run(command, capture_output=True, **extra).stdout.decode(errors="replace")
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip()
        call = " ".join(command[:2])
        raise InfrastructureError(f"{call} failed: {said[-500:] or error_text(error)}") from None


class ContainerSandbox(ElsewhereSandbox):
    """Programs in containers of ``image``, which has ``python3``; one container for each program.

    ``engine`` is ``docker`` or ``podman``. A container has no network, no privileges and a
    read-only file system, with its limits of memory, processes and disk.
    """

    def __init__(self, engine: str, image: str):
        require(
            shutil.which(engine) is not None, f"{engine} is not installed; the sandbox needs it"
        )
        self.engine = engine
        self.image = image

    def _run(self, code: str, limits: Limits, files: Mapping[str, str], stdin: str) -> Ended:
        name = f"tiller-{secrets.token_hex(8)}"
        memory = f"{limits.memory_mib}m"
        disk = f"/scratch:rw,exec,mode=1777,size={limits.disk_mib}m"
        command = [
            *(self.engine, "run", "--rm", "--interactive", "--name", name, "--network", "none"),
            *("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
            *("--user", "65534:65534", "--pids-limit", str(limits.threads + 2)),
            *("--memory", memory, "--memory-swap", memory, "--ulimit", f"cpu={limits.cpu_s}"),
            *("--tmpfs", disk, "--workdir", "/scratch", "--env", "HOME=/scratch"),
            *(self.image, "python3", "-c", SUPERVISOR),
        ]
        order = {
            "files": {**files, "program.py": code},
            "stdin": stdin,
            "wall_s": limits.wall_s,
            "most": limits.output_bytes,
        }
        text = f"{json.dumps(order)}\n".encode()
        try:
            printed = call_engine(*command, wait_s=limits.wall_s + START_S, stdin=text)
        except InfrastructureError:
            subprocess.run([self.engine, "kill", name], capture_output=True, check=False)
            raise
        exit_code, stdout, stderr, late, seconds = json.loads(printed)
        return exit_code, stdout, stderr, late, seconds


@cache
def sandbox_at(place: str) -> ElsewhereSandbox:
    """Return the sandbox at ``place``: a URL, ``docker:IMAGE`` or ``podman:IMAGE``. All callers of
    a process share it, with its circuit breaker. Raises ConfigError for other places.
    """
    kind, _, image = place.partition(":")
    if kind in ("http", "https"):
        return RemoteSandbox(place)
    allowed = "a URL, such as http://127.0.0.1:8080, docker:IMAGE or podman:IMAGE"
    require(
        kind in ("docker", "podman") and bool(image), f"{place!r} is not a sandbox; write {allowed}"
    )
    return ContainerSandbox(kind, image)
