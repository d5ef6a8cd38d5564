"""Alerts of a run reach its webhook, and a webhook that fails changes nothing else."""

import json
import logging
import socket

import pytest

from rl.cli.arguments import find_config
from rl.config import SinksConfig
from rl.errors import ConfigError
from rl.observe import webhook as module
from rl.observe.sinks import Sinks
from rl.observe.webhook import Webhook
from rl.validation import validate
from tests.kit.servers import Handler, Server, serving
from tests.observe.test_sinks import Lines, attempt, events_to


class Hook(Server):
    """Server that keeps what is posted, and answers with the first of ``codes``, otherwise 200."""

    def __init__(self):
        super().__init__(Posted)
        self.posted: list[dict] = []
        self.codes: list[int] = []
        self.url += "/hook"


class Posted(Handler):
    def do_POST(self):
        body = self.body()
        code = self.server.codes.pop(0) if self.server.codes else 200
        if code == 200:
            assert self.path == "/hook" and self.headers["Content-Type"] == "application/json"
            self.server.posted.append(json.loads(body))
        self.send_response(code)
        self.end_headers()


@pytest.fixture
def hook(monkeypatch):
    monkeypatch.setattr(module, "PAUSE_S", 0.0)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving(Hook()) as server:
        yield server


@pytest.fixture
def run(tmp_path, warnings):
    """Function that sends events to a webhook and another sink; returns the other's events."""

    def run(url, emit):
        lines = Lines.Config().build()
        sinks = Sinks([Webhook.Config(url=url).build(), lines], tmp_path, {}, warnings.append)
        events = events_to(sinks)
        attempt(events, 1, 2)
        emit(events)
        sinks.close()
        assert warnings == []
        return lines.seen

    return run


def test_alerts_are_posted_and_other_events_are_not(hook, run, tmp_path, monkeypatch):
    monkeypatch.setenv("HOOK", hook.url)

    def emit(events):
        events.warn("step 2: entropy: entropy/mean is 0.1")
        events.note("saved")
        events.emit("lost", process="generator-1", text="generator-1 is lost")
        events.emit("joined", process="generator-1", text="generator-1 has joined")
        events.emit("ended", summary={"steps": 2})

    run("$HOOK", emit)
    assert [(each["kind"], each["step"]) for each in hook.posted] == [
        ("warning", 2),
        ("lost", 2),
        ("ended", 2),
    ]
    name = tmp_path.name
    assert hook.posted[0]["text"] == f"{name}: warning: step 2: entropy: entropy/mean is 0.1"
    assert hook.posted[2]["text"] == hook.posted[2]["content"] == f"{name} ended after step 2"
    assert {(each["run"], each["host"]) for each in hook.posted} == {(name, socket.gethostname())}


@pytest.mark.parametrize(
    ("emit", "kinds"),
    [
        (lambda events: None, ["stopped"]),
        (lambda events: events.emit("failed", text="stalled: no step was done"), ["failed"]),
    ],
    ids=["by a signal", "by a failure"],
)
def test_every_end_of_a_run_is_posted_once(hook, run, emit, kinds):
    run(hook.url, emit)
    assert [each["kind"] for each in hook.posted] == kinds


def test_an_alert_is_posted_again_until_it_arrives(hook, run, caplog):
    hook.codes = [500, 503]
    run(hook.url, lambda events: events.emit("ended", summary={}))
    assert [each["kind"] for each in hook.posted] == ["ended"]
    assert not caplog.records


def test_a_webhook_that_fails_is_logged_and_the_next_alert_is_tried(hook, run, caplog):
    hook.codes = [500] * module.TRIES
    with caplog.at_level(logging.WARNING):
        seen = run(hook.url, lambda events: events.warn("watch out"))
    assert [each["kind"] for each in hook.posted] == ["stopped"]
    assert "an alert did not arrive" in caplog.text and "watch out" in caplog.text
    assert seen[-2:] == ["warning", "close"]


def test_a_webhook_that_nobody_serves_ends_no_sink(run, caplog, monkeypatch):
    monkeypatch.setattr(module, "PAUSE_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    seen = run(f"http://127.0.0.1:{port}", lambda events: events.emit("ended", summary={}))
    assert seen[-2:] == ["ended", "close"]
    assert "Connection refused" in caplog.text


def test_a_url_that_is_none_is_refused_before_anything_starts():
    config = find_config("quickstart")()
    for url in ("127.0.0.1:80", "$NO_SUCH_VARIABLE", "file:///etc/passwd"):
        config.sinks = SinksConfig(webhook=url)
        with pytest.raises(ConfigError, match="^sinks.webhook is .*; it must be a URL of http or"):
            validate(config)
