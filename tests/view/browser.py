"""Headless Chromium, driven through its debugging socket."""

import contextlib
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome")
WAIT_S = 60.0
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--window-size=1280,720", "--remote-debugging-port=0"),
)


class Browser:
    """One page of a browser. ``errors`` and ``requests`` grow with what the page does."""

    def __init__(self, socket: ClientConnection):
        self._socket = socket
        self._calls = 0
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    _session: str | None = None

    def open(self, url: str) -> None:
        """Load ``url`` and wait until the page has drawn itself."""
        self._call("Page.navigate", url="about:blank")
        self._call("Page.navigate", url=url)
        self.wait("document.body && document.body.dataset.drawn")

    def turn(self, address: str) -> None:
        """Go to the hash ``address`` and wait until its page is drawn."""
        self.value(f"location.hash = {json.dumps(address)}")
        self.wait("document.body.dataset.address === location.hash")

    def press(self, key: str) -> None:
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, text=key[:1])

    @contextlib.contextmanager
    def screen(self, width: int) -> Iterator[None]:
        """Have the screen of a phone or tablet, ``width`` pixels wide."""
        size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": True}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        yield
        self._call("Emulation.clearDeviceMetricsOverride")

    def value(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript, or of its promise."""
        options = {"returnByValue": True, "awaitPromise": True}
        found = self._call("Runtime.evaluate", expression=expression, **options)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until ``expression`` holds."""
        end = time.monotonic() + WAIT_S
        while not self.value(expression):
            assert time.monotonic() < end, f"never: {expression}; {self.errors}"
            time.sleep(0.02)

    def _call(self, method: str, **params: Any) -> dict:
        self._calls += 1
        call = {"id": self._calls, "method": method, "params": params}
        if self._session:
            call["sessionId"] = self._session
        self._socket.send(json.dumps(call))
        while True:
            message = json.loads(self._socket.recv(WAIT_S))
            self._note(message)
            if message.get("id") == self._calls:
                assert "error" not in message, message
                return message["result"]

    def _note(self, message: dict) -> None:
        method = message.get("method")
        params = message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(json.dumps(params["entry"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.errors.append(json.dumps(params["args"]))


@contextlib.contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """Yield a browser with its profile in ``folder``; skip the test if none is installed."""
    found = [path for path in map(shutil.which, NAMES) if path]
    if not found:
        pytest.skip(f"none of {', '.join(NAMES)} is installed")
    command = [found[0], *FLAGS, f"--user-data-dir={folder}"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr
        lines = iter(process.stderr.readline, "")
        address = next(found[1] for each in lines if (found := re.search(r"(ws://\S+)", each)))
        with connect(address, max_size=None) as socket:
            yield Browser(socket)
    finally:
        process.kill()
        process.wait()
