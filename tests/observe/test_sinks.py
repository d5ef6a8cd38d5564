"""Sinks get the events of a run, and never end or delay it."""

import threading
import time
from dataclasses import dataclass

import pytest

from rl.errors import ConfigError
from rl.observe import sinks as module
from rl.observe.events import Events
from rl.observe.sinks import Sink, Sinks

WAIT_S = 60.0


class Lines(Sink):
    """Sink that keeps what it gets, and can be told to fail or to wait."""

    @dataclass(kw_only=True, slots=True)
    class Config(Sink.Config):
        fails_at: int = -1
        waits: bool = False

    def __init__(self, config):
        super().__init__(config)
        self.seen = []
        self.go_on = threading.Event()

    def open(self, run):
        self.seen.append(("open", run.step))

    def write(self, event):
        if self.config.waits:
            self.go_on.wait(WAIT_S)
        if event.get("step") == self.config.fails_at:
            raise OSError("no space left")
        self.seen.append(event["kind"])

    def close(self):
        self.seen.append("close")


def events_to(sinks: Sinks) -> Events:
    return Events(sinks.write)


def attempt(events: Events, first: int, last: int) -> None:
    """Emit what a run emits that goes on after step ``first - 1``."""
    events.emit("started", step=first - 1, host="here", pid=1)
    for step in range(first, last + 1):
        metrics = {"step": step, "reward/mean": step / 10, "loss/mean": float("nan"), "name": "x"}
        events.emit("metrics", step=step, metrics=metrics)


def test_a_sink_is_opened_for_each_attempt_and_closed_at_the_end(tmp_path, warnings):
    sink = Lines.Config().build()
    sinks = Sinks([sink], tmp_path, {}, warnings.append)
    events = events_to(sinks)
    events.note("before the start")
    attempt(events, 1, 2)
    attempt(events, 2, 2)
    sinks.close()
    assert sink.seen == [
        *(("open", 0), "started", "metrics", "metrics", "close"),
        *(("open", 1), "started", "metrics", "close"),
    ]
    assert warnings == []


def test_a_sink_that_fails_is_warned_of_once_and_others_go_on(tmp_path, warnings):
    broken = Lines.Config(fails_at=2).build()
    whole = Lines.Config().build()
    sinks = Sinks([broken, whole], tmp_path, {}, warnings.append)
    attempt(events_to(sinks), 1, 5)
    sinks.close()
    assert warnings == ["sink Lines gets no more events: OSError: no space left"]
    assert whole.seen.count("metrics") == 5


def test_a_sink_that_fails_is_closed_once_and_warned_of_once(tmp_path, warnings):
    class Broken(Lines):
        @dataclass(kw_only=True, slots=True)
        class Config(Lines.Config):
            pass

        def close(self):
            super().close()
            raise OSError("a second error")

    sink = Broken.Config(fails_at=2).build()
    sinks = Sinks([sink], tmp_path, {}, warnings.append)
    attempt(events_to(sinks), 1, 5)
    sinks.close()
    assert sink.seen == [("open", 0), "started", "metrics", "close"]
    assert warnings == ["sink Broken gets no more events: OSError: no space left"]
    broken = Broken.Config().build()  # fails when it is closed
    sinks = Sinks([broken], tmp_path, {}, warnings.append)
    attempt(events_to(sinks), 1, 1)
    sinks.close()
    assert broken.seen.count("close") == 1
    assert warnings[1:] == ["sink Broken gets no more events: OSError: a second error"]


def test_a_sink_that_fails_to_open_is_not_closed(tmp_path, warnings):
    class Shut(Lines):
        @dataclass(kw_only=True, slots=True)
        class Config(Lines.Config):
            pass

        def open(self, run):
            super().open(run)
            if run.step:
                raise OSError("no")

    sink = Shut.Config().build()
    sinks = Sinks([sink], tmp_path, {}, warnings.append)
    attempt(events_to(sinks), 1, 1)
    attempt(events_to(sinks), 2, 2)
    sinks.close()
    assert sink.seen == [("open", 0), "started", "metrics", "close", ("open", 1)]


def test_a_sink_that_fails_and_hangs_in_its_close_delays_nothing(tmp_path, warnings, monkeypatch):
    monkeypatch.setattr(module, "CLOSE_S", 0.2)

    class Stuck(Lines):
        @dataclass(kw_only=True, slots=True)
        class Config(Lines.Config):
            pass

        def close(self):
            self.go_on.wait(WAIT_S)

    sink = Stuck.Config(fails_at=1).build()
    sinks = Sinks([sink], tmp_path, {}, warnings.append)
    attempt(events_to(sinks), 1, 5)
    sinks.close()
    assert not sink.go_on.is_set()
    assert ["no space left" in text for text in warnings] == [True, False]
    sink.go_on.set()


def test_a_sink_without_a_config_of_its_own_is_refused_when_it_is_defined():
    advice = r"class Bare has no Config of its own, .* would build Lines; .*Config\(Lines.Config\)"
    with pytest.raises(ConfigError, match=advice):

        class Bare(Lines):
            pass


def test_a_sink_that_hangs_loses_events_and_delays_nothing(tmp_path, warnings, monkeypatch):
    monkeypatch.setattr(module, "WAITING", 3)
    monkeypatch.setattr(module, "CLOSE_S", 0.2)
    sink = Lines.Config(waits=True).build()
    sinks = Sinks([sink], tmp_path, {}, warnings.append)
    attempt(events_to(sinks), 1, 100)
    sinks.close()
    assert sink.seen == [("open", 0)]
    assert warnings[0] == "sink Lines is too slow and loses events; the run goes on"
    assert "did not close within" in warnings[1]
    sink.go_on.set()


class Slow(Lines):
    """Sink that falls behind from its first event until ``go_on`` is set."""

    @dataclass(kw_only=True, slots=True)
    class Config(Lines.Config):
        waits: bool = True


def test_a_slow_sink_is_closed_after_what_waits_is_written(tmp_path, warnings, monkeypatch):
    monkeypatch.setattr(module, "WAITING", 3)
    sink = Slow.Config().build()
    sinks = Sinks([sink], tmp_path, {}, warnings.append)
    events = events_to(sinks)
    attempt(events, 1, 0)
    until = time.monotonic() + WAIT_S
    while not sink.seen and time.monotonic() < until:
        time.sleep(0.01)
    attempt(events, 1, 100)  # the thread waits in its first event, so these fill the queue
    threading.Timer(0.5, sink.go_on.set).start()
    sinks.close()
    assert sink.seen[-1] == "close"
    assert warnings == ["sink Slow is too slow and loses events; the run goes on"]


def test_sinks_that_hang_share_the_time_to_close(tmp_path, warnings, monkeypatch):
    monkeypatch.setattr(module, "CLOSE_S", 0.3)
    hung = [Slow.Config().build() for _ in range(5)]
    sinks = Sinks(hung, tmp_path, {}, warnings.append)
    attempt(events_to(sinks), 1, 1)
    waits: list[float] = []
    join = threading.Thread.join

    def joined(thread: threading.Thread, timeout: float) -> None:
        waits.append(timeout)
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", joined)
    sinks.close()
    monkeypatch.undo()
    assert 0 < waits[0] <= 0.3 and waits[1:] == [0.0] * 4
    assert len(warnings) == 5
    for sink in hung:
        sink.go_on.set()
