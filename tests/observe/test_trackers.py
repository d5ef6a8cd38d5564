"""Metrics reach TensorBoard, Weights & Biases, MLflow and trackio, also after kills and resumes."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl.cli.arguments import find_config
from rl.config import SinksConfig
from rl.errors import ConfigError
from rl.observe.sinks import Sinks
from rl.observe.trackers import MLflow, TensorBoard, Trackio, WeightsAndBiases
from rl.observe.webhook import Webhook
from rl.validation import validate
from tests.kit.packages import MLFLOW, TRACKIO, package_folder
from tests.kit.pages import ROOT
from tests.observe.test_sinks import WAIT_S, Lines, attempt, events_to


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


PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from rl.observe import sinks as module
from rl.observe.events import Events
from rl.observe.sinks import Sinks
from rl.observe.trackers import MLflow, TensorBoard, Trackio, WeightsAndBiases
module.CLOSE_S = 300.0  # the machine may be busy
sinks = Sinks([{sink}.build()], Path(sys.argv[1]), {{"steps": 3}}, sys.exit)
events = Events(sinks.write)
events.emit("started", step={first} - 1, host="", pid=0)
for step in range({first}, {last} + 1):
    {before}
    events.emit("metrics", step=step, metrics={{"step": step, "reward/mean": step / 10}})
{then}
"""
KILL = """
thread = sinks._threads[0]
while thread.events.qsize() > 100:
    time.sleep(0.001)
thread._sink._writer.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def attempted(
    folder: Path,
    sink: str,
    first: int,
    last: int,
    *,
    before: str = "",
    then: str = "sinks.close()",
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Log the steps ``first`` to ``last`` to a sink in a process of its own: wandb closes its file
    when the process ends, not when the run finishes.
    """
    program = PROGRAM.format(sink=sink, first=first, last=last, before=before, then=then)
    command = [sys.executable, "-c", program, folder]
    environment = os.environ | variables
    return subprocess.run(
        command, timeout=WAIT_S, env=environment, capture_output=True, text=True, check=False
    )


def test_a_killed_run_leaves_files_that_tensorboard_reads(tmp_path):
    assert attempted(tmp_path, "TensorBoard.Config()", 1, 1999, then=KILL).returncode == -9
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


def wandb_content(path: Path) -> tuple[set[tuple[str, ...]], list[tuple[int, float]]]:
    """Return project, id and labels of the run in a file, and step and reward of each row."""
    from wandb.proto import wandb_internal_pb2

    runs = set()
    rows = []
    for data in wandb_records(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("run"):
            run = record.run
            runs.add((run.project, run.run_id, run.display_name, run.notes, *run.tags))
        if record.HasField("history"):
            items = {i.key or i.nested_key[0]: i.value_json for i in record.history.item}
            if "reward/mean" not in items:
                continue
            rows.append((json.loads(items["step"]), json.loads(items["reward/mean"])))
    return runs, rows


def test_an_offline_wandb_run_is_complete_and_resumed_as_itself(tmp_path):
    labels = "name='sums', tags=('small', 'lr=1'), notes='hello'"
    sink = f"WeightsAndBiases.Config(mode='offline', project='tests', {labels})"
    assert attempted(tmp_path, sink, 1, 3).returncode == 0
    (first,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    name = (tmp_path / "wandb" / "id").read_text()
    assert name in first.name
    runs, rows = wandb_content(first)
    wanted = {("tests", name, "sums", "hello", "small", "lr=1")}
    assert runs == wanted
    assert rows == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert attempted(tmp_path, sink, 3, 4).returncode == 0
    (second,) = {*(tmp_path / "wandb").glob("offline-run-*/run-*.wandb")} - {first}
    runs, rows = wandb_content(second)
    assert runs == wanted
    assert rows == [(3, 0.3), (4, 0.4)]
    assert wandb_content(first)[1][-1] == (3, 0.3)  # the file of the first attempt stays


WRITE = """
    from rl.observe.rollout_files import RolloutFolder
    from tests.kit.records import chunk, rollout
    folder = RolloutFolder(Path(sys.argv[1], "rollouts"))
    if step == 2:  # that of step 1 is written late, that of step 3 never
        for late in (1, 2):
            folder.write(late, [chunk(*(rollout(each, 0, (2, 3)) for each in range(4 * late)))])
"""


@pytest.mark.long
def test_recorded_rollouts_are_tables_in_wandb(tmp_path):
    done = attempted(tmp_path, "WeightsAndBiases.Config(samples=3)", 1, 3, before=WRITE)
    assert done.returncode == 0, done.stderr
    found = []
    for path in (tmp_path / "wandb").rglob("samples/rollouts_*.table.json"):
        table = json.loads(path.read_text())
        assert table["columns"][:5] == ["prompt_id", "sample", "prompt", "answer", "text"]
        assert {row[4] for row in table["data"]} == {"<script>\x00"}
        found.append([row[0] for row in table["data"]])
    assert sorted(found) == [[0, 2], [0, 3, 6]]


ROWS = """
sinks.close()
from trackio.sqlite_storage import SQLiteStorage
print(SQLiteStorage.get_logs("tests", Path(sys.argv[1]).name))
"""


@pytest.mark.long
def test_trackio_has_each_step(tmp_path):
    variables = {
        "PYTHONPATH": str(package_folder(TRACKIO)),
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HF_HUB_OFFLINE": "1",
    }
    sink = "Trackio.Config(project='tests')"
    done = attempted(tmp_path / "run", sink, 1, 3, then=ROWS, **variables)
    assert done.returncode == 0, done.stderr
    assert [f"'reward/mean': 0.{step}" in done.stdout for step in (1, 2, 3)] == [True] * 3


MLFLOW_ROWS = """
sinks.close()
import json
from mlflow import MlflowClient
client = MlflowClient(str(Path(sys.argv[1], "store")))
runs = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
rows = client.get_metric_history(runs[0].info.run_id, "reward/mean")
facts = [[run.info.status, run.info.run_name, run.data.tags, run.data.params] for run in runs]
print(json.dumps([facts, [[row.step, row.value] for row in rows]]))
"""


@pytest.mark.long
def test_mlflow_has_each_step_with_the_config_and_the_labels(tmp_path):
    variables = {
        "PYTHONPATH": f"{ROOT}:{package_folder(MLFLOW)}",
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }
    labels = "name='sums', tags=('small', 'lr=1'), notes='hello'"
    sink = f"MLflow.Config(uri={str(tmp_path / 'store')!r}, project='tests', {labels})"
    ended = "events.emit('ended', summary={})"
    for first, last, then in ((1, 3, ""), (3, 4, ended)):
        done = attempted(tmp_path, sink, first, last, then=f"{then}\n{MLFLOW_ROWS}", **variables)
        assert done.returncode == 0, done.stderr
        ((run,), rows) = json.loads(done.stdout.splitlines()[-1])
        assert run[:2] == ["FINISHED" if then else "KILLED", "sums"]
        own = {"small": "true", "lr": "1", "mlflow.note.content": "hello"}
        assert run[2].items() >= own.items()
        assert run[3] == {"steps": "3"}
    assert rows == [[1, 0.1], [2, 0.2], [3, 0.3], [3, 0.3], [4, 0.4]]


def test_the_config_says_which_sinks_a_run_has():
    own = Lines.Config()
    sinks = SinksConfig(
        tensorboard=True,
        wandb="offline",
        wandb_samples=3,
        trackio=True,
        mlflow="http://here",
        webhook="$HOOK",
        project="p",
        name="n",
        tags=("a", "b=c"),
        notes="why",
        custom=(own,),
    ).all()
    labels = {"project": "p", "name": "n", "tags": ("a", "b=c"), "notes": "why"}
    assert sinks == [
        TensorBoard.Config(),
        WeightsAndBiases.Config(mode="offline", samples=3, **labels),
        MLflow.Config(uri="http://here", **labels),
        Trackio.Config(**labels),
        Webhook.Config(url="$HOOK"),
        own,
    ]
    assert SinksConfig().all() == []


def test_weights_and_biases_online_needs_a_key_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
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
    for name, value in (("trackio", True), ("mlflow", "mlflow.db")):
        config.sinks = SinksConfig(**{name: value})
        said = f"sinks.{name} needs the package {name}, .*pip install {name}"
        with pytest.raises(ConfigError, match=said):
            validate(config)
