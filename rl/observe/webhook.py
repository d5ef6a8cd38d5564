"""Sink that posts alerts of a run to a webhook."""

import json
import logging
import os
import socket
import time
import urllib.request
from dataclasses import dataclass

from rl.errors import error_text, require_value
from rl.observe.events import Event
from rl.observe.sinks import RunFacts, Sink

ALERTS = ("warning", "lost", "failed", "ended")
"""Kinds of events that are alerts. Those of the watchdog are warnings, or fail the run."""
TRIES = 3
TIMEOUT_S = 2.0
PAUSE_S = 0.5
"""Time between two tries. A sink has 10 s in all to close."""

logger = logging.getLogger(__name__)


class Webhook(Sink):
    """POST requests with JSON to a URL: ``run``, ``host``, ``kind``, ``step``, and a text as
    ``text`` (Slack, Mattermost) and ``content`` (Discord).

    Alerts are warnings, such as those of the watchdog, lost processes, and the end of the run, also
    by a failure or a signal. An alert that does not arrive is logged, and the next one is tried.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Sink.Config):
        """Fields of the sink."""

        url: str = ""
        """URL, in which ``$NAME`` is a variable of the environment."""

        def check(self) -> None:
            """Raise ConfigError unless the URL is one of HTTP."""
            is_http = os.path.expandvars(self.url).startswith(("http://", "https://"))
            allowed = "a URL of http or https, or a variable that holds one, such as $ALERTS_URL"
            require_value(is_http, "sinks.webhook", self.url, allowed)

    config: Config

    def open(self, run: RunFacts) -> None:
        self._run = run.folder.name
        self._step = run.step
        self._ended = False

    def write(self, event: Event) -> None:
        self._step = event.get("step", self._step)
        kind = event["kind"]
        if kind in ALERTS:
            self._ended = kind in ("failed", "ended")
            done = f"ended after step {self._step}" if kind == "ended" else ""
            self._post(kind, done or event["text"])

    def close(self) -> None:
        if not self._ended:
            self._post("stopped", f"stopped after step {self._step}")

    def _post(self, kind: str, text: str) -> None:
        """Post an alert, several times if it does not arrive."""
        text = f"{self._run}: {kind}: {text}" if kind != "ended" else f"{self._run} {text}"
        host = socket.gethostname()
        facts = {"run": self._run, "host": host, "kind": kind, "step": self._step}
        body = json.dumps({**facts, "text": text, "content": text}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(os.path.expandvars(self.config.url), body, headers)
        for number in range(1, TRIES + 1):
            try:
                urllib.request.urlopen(request, timeout=TIMEOUT_S).close()
                return
            except (OSError, ValueError) as error:  # also an answer that is an error
                problem = error_text(error)
            if number < TRIES:
                time.sleep(PAUSE_S)
        logger.warning("sinks.webhook: an alert did not arrive: %s: %s", text, problem)
