"""All checks on the stand-in device, as a user starts them."""

import json
import os
import subprocess
import sys

import pytest

from scripts.gpu_check.checks import CHECKS
from tests import warm

NEED_A_GPU = {
    "parity-bfloat16-varlen",
    "push-cuda_ipc",
    "engine-push-cuda_ipc",
    "engine-bfloat16-float8-compiled",
}
SHARDED = {"parity-fsdp4-tp4"}
"""Checks of more ranks than a small host runs within their deadlines."""
ENGINES = {
    "engine-float32-qwen3",
    "engine-float32-lora",
    "engine-bfloat16-float8",
    "engine-bfloat16-float8-compiled",
}
"""Variants of the trainer that stand for the others here."""
WITHOUT = """
import sys
sys.modules |= dict.fromkeys(("vllm", "monarch"))
"""


def check_rows(rows, names):
    assert {row["name"]: row["wrong"] for row in rows} == dict.fromkeys(names, "")
    skipped = {row["name"] for row in rows if row["state"] == "skipped"}
    assert skipped == NEED_A_GPU.intersection(names)
    assert all(row["numbers"] for row in rows if row["name"] not in NEED_A_GPU)


@pytest.mark.long
def test_a_trainer_is_checked_without_vllm_and_monarch(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    names = ["engine-float32-lora", "engine-push-shared_memory"]
    command = [sys.executable, "-m", "scripts.gpu_check", "--device", "cpu", "--only"]
    files = ["--json", tmp_path / "out.json", "--logs", tmp_path / "logs"]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.getcwd()}"}
    done = subprocess.run(
        [*command, *names, *files], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    check_rows(json.loads((tmp_path / "out.json").read_text())["checks"], names)


@pytest.mark.long
@pytest.mark.parametrize("function", sorted({check.function for check in CHECKS}))
def test_every_check_passes_on_the_stand_in(function, tmp_path):
    checks = {check.name for check in CHECKS if check.function == function}
    names = sorted(checks & ENGINES or checks - SHARDED)
    command = ["scripts.gpu_check", "--device", "cpu", "--only", *names]
    files = ["--json", tmp_path / "out.json", "--logs", tmp_path / "logs"]
    done = warm.run(*command, *files, timeout=3600)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    check_rows(json.loads((tmp_path / "out.json").read_text())["checks"], names)
    weights = [path for path in (tmp_path / "logs").rglob("*") if path.suffix == ".distcp"]
    assert weights == []
