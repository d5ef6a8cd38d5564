"""All checks on the stand-in device, as a user starts them."""

import json

import pytest

from scripts.gpu_check.checks import CHECKS
from tests import warm

NEED_A_GPU = {"parity-bfloat16-varlen", "push-cuda_ipc"}
SHARDED = {"parity-fsdp4-tp4"}
"""Checks of more ranks than a small host runs within their deadlines."""


@pytest.mark.long
def test_every_check_passes_on_the_stand_in(tmp_path):
    names = [check.name for check in CHECKS if check.name not in SHARDED]
    command = ["scripts.gpu_check", "--device", "cpu", "--only", *names]
    files = ["--json", tmp_path / "out.json", "--logs", tmp_path / "logs"]
    done = warm.run(*command, *files, timeout=3600)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    rows = {row["name"]: row for row in json.loads((tmp_path / "out.json").read_text())["checks"]}
    assert {name for name, row in rows.items() if row["state"] == "skipped"} == NEED_A_GPU
    assert all(row["numbers"] for name, row in rows.items() if name not in NEED_A_GPU)
    weights = [path for path in (tmp_path / "logs").rglob("*") if path.suffix == ".distcp"]
    assert weights == []
