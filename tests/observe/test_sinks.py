"""Sinks get the events of a run, and never end or delay it."""

import json
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rl.cli import find_config
from rl.config import SinksConfig
from rl.errors import ConfigError
from rl.observe import sinks as module
from rl.observe.events import Events
from rl.observe.sinks import Sink, Sinks
from rl.observe.trackers import TensorBoard, Trackio, WeightsAndBiases
from rl.validation import validate
from tests.installed import trackio_folder

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


@pytest.fixture
def warnings():
    return []


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
    began = time.monotonic()
    sinks.close()
    assert time.monotonic() - began < WAIT_S / 2
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
    began = time.monotonic()
    attempt(events_to(sinks), 1, 100)
    sinks.close()
    assert time.monotonic() - began < WAIT_S / 2
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
    monkeypatch.setattr(module, "CLOSE_S", 1.0)
    hung = [Slow.Config().build() for _ in range(5)]
    sinks = Sinks(hung, tmp_path, {}, warnings.append)
    attempt(events_to(sinks), 1, 1)
    began = time.monotonic()
    sinks.close()
    assert time.monotonic() - began < 4.0  # one after another they take 5 s
    assert len(warnings) == 5
    for sink in hung:
        sink.go_on.set()


def tensorboard_steps(folder: Path) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert "loss/mean" not in events.Tags()["scalars"]  # not finite
    scalars = events.Scalars("reward/mean")
    assert [each.value for each in scalars] == pytest.approx([each.step / 10 for each in scalars])
    return [each.step for each in scalars]


def test_tensorboard_reads_each_step_once_also_after_a_resume(tmp_path, warnings):
    for first, last in ((1, 4), (3, 6)):
        sinks = Sinks([TensorBoard.Config().build()], tmp_path, {}, warnings.append)
        events = events_to(sinks)
        attempt(events, first, last)
        events.warn("watch out")
        events.emit("evaluation", step=last, metrics={"eval/exact_match": 0.5})
        sinks.close()
    assert warnings == []
    assert tensorboard_steps(tmp_path) == [1, 2, 3, 4, 5, 6]


KILLED = """
import os, signal, sys, time
from pathlib import Path
from rl.observe.events import Events
from rl.observe.sinks import Sinks
from rl.observe.trackers import TensorBoard
sinks = Sinks([TensorBoard.Config().build()], Path(sys.argv[1]), {}, print)
events = Events(sinks.write)
events.emit("started", step=0, host="", pid=0)
for step in range(1, 2000):
    events.emit("metrics", step=step, metrics={"reward/mean": step / 10})
thread = sinks._threads[0]
while thread._events.qsize() > 100:
    time.sleep(0.001)
thread._sink._writer.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_leaves_files_that_tensorboard_reads(tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path], timeout=WAIT_S, check=False)
    assert done.returncode == -9
    steps = tensorboard_steps(tmp_path)
    assert steps == [*range(1, len(steps) + 1)]
    assert len(steps) > 0


def wandb_records(path: Path) -> Iterator[bytes]:
    """Yield the records of a file in LevelDB's log format, after a header of 7 bytes: blocks of 32
    KiB, in which each part of a record has a checksum, a length and a type.
    """
    content = path.read_bytes()
    assert content[:4] == b":W&B"
    position = 7
    parts = b""
    while position + 7 <= len(content):
        room = 2**15 - position % 2**15
        if room < 7:
            position += room
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""
    assert position == len(content)


WANDB = """
import sys
from pathlib import Path
from rl.observe.events import Events
from rl.observe.sinks import Sinks
from rl.observe.trackers import WeightsAndBiases
config = WeightsAndBiases.Config(mode="offline", project="tests")
sinks = Sinks([config.build()], Path(sys.argv[1]), {"steps": 3}, sys.exit)
events = Events(sinks.write)
first, last = int(sys.argv[2]), int(sys.argv[3])
events.emit("started", step=first - 1, host="", pid=0)
for step in range(first, last + 1):
    events.emit("metrics", step=step, metrics={"step": step, "reward/mean": step / 10})
sinks.close()
"""


def wandb_attempt(folder: Path, first: int, last: int) -> None:
    """Log the steps ``first`` to ``last`` offline, in a process of its own: wandb closes its file
    when the process ends, not when the run finishes.
    """
    command = [sys.executable, "-c", WANDB, folder, str(first), str(last)]
    subprocess.run(command, timeout=WAIT_S, check=True)


def wandb_content(path: Path) -> tuple[set[tuple[str, str]], list[tuple[int, float]]]:
    """Return projects and ids of the run in a file, and step and reward of each row."""
    from wandb.proto import wandb_internal_pb2

    runs = set()
    rows = []
    for data in wandb_records(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("run"):
            runs.add((record.run.project, record.run.run_id))
        if record.HasField("history"):
            items = {i.key or i.nested_key[0]: i.value_json for i in record.history.item}
            rows.append((json.loads(items["step"]), json.loads(items["reward/mean"])))
    return runs, rows


def test_an_offline_wandb_run_is_complete_and_resumed_as_itself(tmp_path):
    wandb_attempt(tmp_path, 1, 3)
    (first,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    name = (tmp_path / "wandb" / "id").read_text()
    assert name in first.name
    runs, rows = wandb_content(first)
    assert runs == {("tests", name)}
    assert rows == [(1, 0.1), (2, 0.2), (3, 0.3)]
    wandb_attempt(tmp_path, 3, 4)
    (second,) = {*(tmp_path / "wandb").glob("offline-run-*/run-*.wandb")} - {first}
    runs, rows = wandb_content(second)
    assert runs == {("tests", name)}
    assert rows == [(3, 0.3), (4, 0.4)]
    assert wandb_content(first)[1][-1] == (3, 0.3)  # the file of the first attempt stays


TRACKIO = """
import sys
from pathlib import Path
from rl.observe.events import Events
from rl.observe.sinks import Sinks
from rl.observe.trackers import Trackio
sinks = Sinks([Trackio.Config(project="tests").build()], Path(sys.argv[1]), {"steps": 3}, print)
events = Events(sinks.write)
events.emit("started", step=0, host="", pid=0)
for step in (1, 2, 3):
    events.emit("metrics", step=step, metrics={"reward/mean": step / 10})
sinks.close()
from trackio.sqlite_storage import SQLiteStorage
print(SQLiteStorage.get_logs("tests", Path(sys.argv[1]).name))
"""


def test_trackio_has_each_step(tmp_path):
    environment = {
        **os.environ,
        "PYTHONPATH": str(trackio_folder()),
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", TRACKIO, tmp_path / "run"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [f"'reward/mean': 0.{step}" in done.stdout for step in (1, 2, 3)] == [True] * 3


def test_the_config_says_which_sinks_a_run_has():
    own = Lines.Config()
    sinks = SinksConfig(
        tensorboard=True, wandb="offline", trackio=True, project="p", custom=(own,)
    ).all()
    assert sinks == [
        TensorBoard.Config(),
        WeightsAndBiases.Config(mode="offline", project="p"),
        Trackio.Config(project="p"),
        own,
    ]
    assert SinksConfig().all() == []


def test_weights_and_biases_online_needs_a_key_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    online = WeightsAndBiases.Config(mode="online")
    with pytest.raises(ConfigError, match="sinks.wandb is 'online', and this user has no key"):
        online.check()
    WeightsAndBiases.Config(mode="offline").check()
    keys = tmp_path / ".netrc"
    keys.write_text("machine api.wandb.ai login user password secret\n")
    keys.chmod(0o600)
    online.check()
    keys.unlink()
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    online.check()


def test_a_package_that_is_missing_is_named_before_anything_starts():
    config = find_config("quickstart")()
    config.sinks.trackio = True
    with pytest.raises(
        ConfigError, match=r"sinks.trackio needs the package trackio, .*pip install"
    ):
        validate(config)
