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
FULL = "sink Lines gets no more events: OSError: no space left"
SLOW = "sink Lines is too slow and loses events; the run goes on"


class Lines(Sink):
    """Sink that keeps what it gets, and can be told to fail or to wait."""

    @dataclass(kw_only=True, slots=True)
    class Config(Sink.Config):
        fails_at: int = -1
        """Step whose event raises."""
        opens_before: int = 100
        """Step from which on an attempt cannot be opened."""
        waits: bool = False
        close: str = ""
        """``raises`` or ``hangs``."""

    def __init__(self, config):
        super().__init__(config)
        self.seen = []
        self.go_on = threading.Event()

    def open(self, run):
        self.seen.append(("open", run.step))
        if run.step >= self.config.opens_before:
            raise OSError("no space left")

    def write(self, event):
        if self.config.waits:
            self.go_on.wait(WAIT_S)
        if event.get("step") == self.config.fails_at:
            raise OSError("no space left")
        self.seen.append(event["kind"])

    def close(self):
        self.seen.append("close")
        if self.config.close == "raises":
            raise OSError("no space left")
        if self.config.close == "hangs":
            self.go_on.wait(WAIT_S)


def events_to(sinks: Sinks) -> Events:
    return Events(sinks.write)


def attempt(events: Events, first: int, last: int) -> None:
    """Emit what a run emits that goes on after step ``first - 1``."""
    events.emit("started", step=first - 1, host="here", pid=1)
    for step in range(first, last + 1):
        metrics = {"step": step, "reward/mean": step / 10, "loss/mean": float("nan"), "name": "x"}
        events.emit("metrics", step=step, metrics=metrics)


@pytest.fixture
def started(tmp_path, warnings):
    """Return a function that starts sinks, and let those that hang end after the test."""
    made = []

    def start(*sinks: Lines) -> Sinks:
        made.extend(sinks)
        return Sinks([*sinks], tmp_path, {}, warnings.append)

    yield start
    for sink in made:
        sink.go_on.set()


@pytest.fixture
def short_times(monkeypatch):
    monkeypatch.setattr(module, "WAITING", 3)
    monkeypatch.setattr(module, "CLOSE_S", 0.2)


def test_a_sink_is_opened_for_each_attempt_and_closed_at_the_end(started, warnings):
    sink = Lines.Config().build()
    sinks = started(sink)
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


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        ({"fails_at": 2}, ["started", "metrics", "close"]),
        ({"fails_at": 2, "close": "raises"}, ["started", "metrics", "close"]),
        ({"close": "raises"}, ["started", "metrics", "metrics", "metrics", "close"]),
        ({"opens_before": 0}, []),
    ],
)
def test_a_sink_that_fails_is_closed_once_if_it_is_open_and_others_go_on(
    fault, seen, started, warnings
):
    broken = Lines.Config(**fault).build()
    whole = Lines.Config().build()
    sinks = started(broken, whole)
    attempt(events_to(sinks), 1, 3)
    sinks.close()
    assert broken.seen == [("open", 0), *seen]
    assert warnings == [FULL]
    assert whole.seen.count("metrics") == 3


def test_a_sink_that_cannot_be_opened_again_is_not_closed_again(started, warnings):
    sink = Lines.Config(opens_before=1).build()
    sinks = started(sink)
    attempt(events_to(sinks), 1, 1)
    attempt(events_to(sinks), 2, 2)
    sinks.close()
    assert sink.seen == [("open", 0), "started", "metrics", "close", ("open", 1)]


@pytest.mark.usefixtures("short_times")
def test_a_sink_that_fails_and_hangs_in_its_close_delays_nothing(started, warnings):
    sink = Lines.Config(fails_at=1, close="hangs").build()
    sinks = started(sink)
    attempt(events_to(sinks), 1, 2)
    sinks.close()
    assert not sink.go_on.is_set()
    assert ["no space left" in text for text in warnings] == [True, False]


def test_a_sink_without_a_config_of_its_own_is_refused_when_it_is_defined():
    advice = r"class Bare has no Config of its own, .* would build Lines; .*Config\(Lines.Config\)"
    with pytest.raises(ConfigError, match=advice):

        class Bare(Lines):
            pass


@pytest.mark.usefixtures("short_times")
def test_a_sink_that_hangs_loses_events_and_delays_nothing(started, warnings):
    sink = Lines.Config(waits=True).build()
    sinks = started(sink)
    attempt(events_to(sinks), 1, 100)
    sinks.close()
    assert sink.seen == [("open", 0)]
    assert warnings[0] == SLOW
    assert "did not close within" in warnings[1]


def test_a_slow_sink_is_closed_after_what_waits_is_written(started, warnings, monkeypatch):
    monkeypatch.setattr(module, "WAITING", 3)
    sink = Lines.Config(waits=True).build()
    sinks = started(sink)
    events = events_to(sinks)
    attempt(events, 1, 0)
    until = time.monotonic() + WAIT_S
    while not sink.seen and time.monotonic() < until:
        time.sleep(0.01)
    attempt(events, 1, 100)  # the thread waits in its first event, so these fill the queue
    threading.Timer(0.5, sink.go_on.set).start()
    sinks.close()
    assert sink.seen[-1] == "close"
    assert warnings == [SLOW]


@pytest.mark.usefixtures("short_times")
def test_sinks_that_hang_share_the_time_to_close(started, warnings, monkeypatch):
    sinks = started(*(Lines.Config(waits=True).build() for _ in range(5)))
    attempt(events_to(sinks), 1, 1)
    waits: list[float] = []
    join = threading.Thread.join

    def joined(thread: threading.Thread, timeout: float) -> None:
        waits.append(timeout)
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", joined)
    sinks.close()
    monkeypatch.undo()
    assert 0 < waits[0] <= 0.2 and waits[1:] == [0.0] * 4
    assert len(warnings) == 5
