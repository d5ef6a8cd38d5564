"""A green CI means that every test ran; elsewhere, the last lines say which did not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILE = """
from tests.needs import cannot_run

def test_one():
    cannot_run("no right to make namespaces")

def test_two():
    cannot_run("no right to make namespaces")

def test_three():
    pass
"""


@pytest.mark.parametrize("ci", [False, True])
def test_tests_that_cannot_run_are_named_at_the_end_and_fail_in_ci(ci, tmp_path):
    (tmp_path / "test_file.py").write_text(FILE)
    environment = {name: value for name, value in os.environ.items() if name != "CI"} | (
        {"CI": "true"} if ci else {}
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.conftest",
        "-c",
        str(ROOT / "pyproject.toml"),
    ]
    ran = subprocess.run(
        [*command, str(tmp_path)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == ci
    if ci:
        assert "not run, as it must be in CI: no right to make namespaces" in ran.stdout
    else:
        last = ran.stdout.splitlines()[-1]
        assert last.startswith("NOT RUN: 2 of the tests in ")
        assert last.endswith("test_file.py: no right to make namespaces")
