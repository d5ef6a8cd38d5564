"""``python -m rl.serve`` as a user starts it."""

import json
import os
import re
import time
import urllib.request
from pathlib import Path

from tests import warm
from tests.kit.runs import PATIENCE_S, TIMEOUT_S, listening, living

READY = r"^serving .* (http://[^/,\s]+)"


class Server:
    """One ``python -m rl.serve``, until the block ends. Its output is in ``folder``."""

    def __init__(self, folder: Path, *arguments: str):
        self._said = folder / "serve.out"
        self._error = folder / "serve.err"
        self._program = warm.Program(
            ["rl.serve", "--port", "0", *arguments], stdout=self._said, stderr=self._error
        )

    def __enter__(self):
        deadline = time.monotonic() + TIMEOUT_S
        while not (ready := re.search(READY, self._output(), re.MULTILINE)):
            if self._program.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                raise AssertionError(f"it does not serve: {self._error.read_text()}")
            time.sleep(0.05)
        self.url = ready[1]
        return self

    def __exit__(self, *error):
        self._program.kill_group()
        self._program.wait()

    def _output(self) -> str:
        return self._said.read_text() if self._said.exists() else ""

    def listened(self):
        family = {self._program.pid}
        for pid, parent, _ in living():
            family |= {pid} if parent in family else set()
        return listening([*family])

    def ask(self, path, method="GET", body=None):
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=json.dumps(body).encode() if body else None,
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)

    def end(self, number):
        """Send a signal; return exit code and standard error. Nothing of the group is left."""
        self._program.send_signal(number)
        code = self._program.wait(TIMEOUT_S)
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            try:
                os.killpg(self._program.pid, 0)
            except ProcessLookupError:
                return code, self._error.read_text()
            time.sleep(0.1)
        raise AssertionError("processes of the server are left")
