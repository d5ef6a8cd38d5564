"""All checks on the stand-in device, as a user starts them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.gpu_check.checks import CHECKS
from tests.e2e.runs import heed_hangups

ROOT = Path(__file__).parents[2]
NEED_A_GPU = {"parity-bfloat16-varlen", "push-cuda_ipc"}
SHARDED = {"parity-fsdp4-tp4"}
"""Checks of more ranks than a small host runs within their deadlines."""


@pytest.mark.long
def test_every_check_passes_on_the_stand_in(tmp_path):
    names = [check.name for check in CHECKS if check.name not in SHARDED]
    command = [sys.executable, "-m", "scripts.gpu_check", "--device", "cpu", "--only", *names]
    files = ["--json", str(tmp_path / "out.json"), "--logs", str(tmp_path / "logs")]
    done = subprocess.run(
        [*command, *files], cwd=ROOT, capture_output=True, text=True, timeout=3600,
        preexec_fn=heed_hangups,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    rows = {row["name"]: row for row in json.loads((tmp_path / "out.json").read_text())["checks"]}
    assert {name for name, row in rows.items() if row["state"] == "skipped"} == NEED_A_GPU
    assert all(row["numbers"] for name, row in rows.items() if name not in NEED_A_GPU)
    weights = [path for path in (tmp_path / "logs").rglob("*") if path.suffix == ".distcp"]
    assert weights == []
