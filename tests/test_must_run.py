"""A test that cannot run on this machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = """
import pytest

@pytest.fixture
def tool():
    pytest.skip("no such tool")

def test_of_a_tool(tool):
    pass

def test_that_looks():
    pytest.importorskip("no_such_package")

@pytest.mark.skipif(True, reason="another user")
def test_of_a_user():
    pass
"""


@pytest.mark.parametrize(
    ("ci", "counts", "reasons"),
    [
        ("", "3 skipped", ["no such tool", "could not import 'no_such_package'", "another user"]),
        (
            "true",
            "1 failed, 1 skipped, 1 error",
            ["not run, as it must be in CI: no such tool"],
        ),
    ],
)
def test_a_skipped_test_fails_in_ci(tmp_path, ci, counts, reasons):
    file = tmp_path / "test_tools.py"
    file.write_text(TESTS)
    options = ["-p", "tests.must_run", "-c", os.devnull, "-rsfE", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(file)],
        cwd=ROOT,
        env=os.environ | {"CI": ci},
        capture_output=True,
        text=True,
    )
    assert counts in done.stdout, done.stdout
    assert [reason for reason in reasons if reason not in done.stdout] == []
