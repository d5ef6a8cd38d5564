"""Run folders with damage, each found with its fix."""

import json
import os
import shutil
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from configs.quickstart import quickstart
from configs.sft_jsonl import sft_jsonl
from rl.config.frozen import frozen
from rl.doctor.examine import check_run
from rl.observe.checkpoint_folders import ROLLOUTS
from rl.observe.owner import FolderOwner
from rl.observe.rollout_files import Chunk, write_rollouts
from tests.kit.tables import check_rows


@pytest.fixture(scope="module")
def good_run(tmp_path_factory) -> Path:
    """A run with two complete checkpoints."""
    folder = tmp_path_factory.mktemp("good") / "run"
    for step in (50, 100):
        path = folder / "checkpoints" / f"step-{step}"
        dcp.save({"weight": torch.ones(1000)}, checkpoint_id=path)
        write_rollouts(path / ROLLOUTS, [Chunk(rollouts=[], columns={})])
    content = {"name": "quickstart", "command": "", "config": frozen(quickstart())}
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss/mean": null}\n{"step": 2')
    return folder


@pytest.fixture
def run(good_run, tmp_path) -> Path:
    """Copy of the run for a test to damage."""
    return shutil.copytree(good_run, tmp_path / "run")


def own(folder: Path, **changes) -> None:
    """Write the owner's file of this process, with changes."""
    with FolderOwner(folder):
        owner = json.loads((folder / "owner.json").read_text())
    (folder / "owner.json").write_text(json.dumps(owner | changes))


def newest(folder: Path) -> Path:
    return folder / "checkpoints" / "step-100"


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def fail(folder: Path) -> None:
    failure = {"error": "generator rank 1 died", "place": "mine.py, line 3", "command": "again"}
    (folder / "failure.json").write_text(json.dumps(failure))


def age(folder: Path) -> None:
    own(folder, boot="another", host="far")
    os.utime(folder / "owner.json", (0, 0))


LOST = ("error", "step-100")
GONE_BACK = "delete .*step-100; .* before it"
DAMAGED_CONFIGS = {
    "no config": (
        lambda f: (f / "config.json").unlink(),
        *("error", r"config.json", "there is no such file", "config.json of a run"),
    ),
    "a config that is cut off": (
        lambda f: cut(f / "config.json"),
        *("error", "config.json", "is not JSON", "config.json of a run"),
    ),
}
DAMAGED = {
    "weights that are missing": (
        lambda f: next(newest(f).glob("*.distcp")).unlink(),
        *(*LOST, r"distcp has 0 bytes of", GONE_BACK),
    ),
    "weights that are cut off": (
        lambda f: cut(next(newest(f).glob("*.distcp"))),
        *(*LOST, r"distcp has \d+ bytes of", GONE_BACK),
    ),
    "metadata that is cut off": (
        lambda f: cut(newest(f) / ".metadata"),
        *(*LOST, r"\.metadata cannot be read", GONE_BACK),
    ),
    "rollouts that are missing": (
        lambda f: (newest(f) / ROLLOUTS).unlink(),
        *(*LOST, r"rollouts.parquet cannot be read", GONE_BACK),
    ),
    "rollouts that are cut off": (
        lambda f: cut(newest(f) / ROLLOUTS),
        *(*LOST, r"rollouts.parquet cannot be read", GONE_BACK),
    ),
    "a save that was cut off": (
        lambda f: (f / "checkpoints" / "step-150").mkdir(),
        *("warning", "step-150", "is incomplete", "goes on from step 100"),
    ),
    "a row that is damaged": (
        lambda f: (f / "ledger.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n'),
        *("error", "ledger.jsonl", "line 2: not JSON.*remove the line", "correct it there"),
    ),
    "a living owner": (
        *(own, "warning", "owner.json", f"process {os.getpid()} on {socket.gethostname()}"),
        "wait for",
    ),
    "an owner on another host": (
        lambda f: own(f, boot="another", host="far"),
        *("warning", "owner.json", "on far writes here", "wait for its end"),
    ),
    "an owner on a host that is gone": (
        *(age, "warning", "owner.json", "on far, which another host ran", "waits 60 s"),
    ),
    "a failure": (
        *(fail, "warning", "failure.json", "generator rank 1 died; at mine.py, line 3", "again"),
    ),
    "a failure that is cut off": (
        lambda f: (f / "failure.json").write_text('{"error": '),
        *("warning", "failure.json", "cannot be read", "--resume"),
    ),
}


def test_a_damaged_run_folder_is_found(good_run, tmp_path, matches):
    def check(case: str) -> None:
        folder = shutil.copytree(good_run, tmp_path / case.replace(" ", "-"))
        damage, severity, where, what, fix = DAMAGED[case]
        damage(folder)
        found = [*check_run(folder, quickstart())]
        assert found and where in found[0].where
        matches(found, severity, found[0].where, what, fix)

    check_rows(DAMAGED, check)


@pytest.mark.parametrize("case", [*DAMAGED_CONFIGS, "weights that are missing", "a failure"])
def test_the_program_reports_a_damaged_run_folder(case, run, doctor, matches):
    damage, severity, where, what, fix = (DAMAGED_CONFIGS | DAMAGED)[case]
    damage(run)
    code, found = doctor(run)
    assert code == (2 if severity == "error" else 0)
    assert found and where in found[0]["where"]
    matches(found, severity, found[0]["where"], what, fix)


def test_a_good_run_folder_has_no_findings(run, doctor):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert doctor(run) == (0, [])
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_a_run_of_the_supervised_trainer_needs_no_rollouts(run, good_inputs, tmp_path, doctor):
    config = sft_jsonl()
    config.model.hf_path = str(good_inputs / "tiny")
    config.task.path = str(tmp_path / "texts.jsonl")
    said = {"role": "assistant", "content": "Yes."}
    asked = ({"role": "user", "content": f"Is {number} a number?"} for number in range(40))
    rows = (json.dumps({"messages": [each, said]}) for each in asked)
    (tmp_path / "texts.jsonl").write_text("\n".join(rows))
    content = {"name": "sft_jsonl", "command": "", "config": frozen(config)}
    (run / "config.json").write_text(json.dumps(content))
    (newest(run) / ROLLOUTS).unlink()
    assert doctor(run) == (0, [])


def test_a_run_without_checkpoints_is_found(run, doctor):
    def unsave(folder: Path) -> None:
        for path in folder.glob("checkpoints/*/.metadata"):
            path.unlink()

    unsave(run)
    code, found = doctor(run)
    assert code == 0
    assert [each["severity"] for each in found] == ["warning"] * 3
    assert "has no complete checkpoint" in found[-1]["what"]


def test_a_killed_owner_on_this_host_is_no_finding(run, doctor):
    own(run, pid=2**22 + 1)  # above the largest pid
    assert doctor(run) == (0, [])


def test_the_fields_of_a_run_can_be_changed(run, doctor, matches):
    code, found = doctor(run, "--rollout.stream_chunks", "2")
    assert code == 2
    matches(found, "error", "rollout.stream_chunks", "is 2", "1 unless")
