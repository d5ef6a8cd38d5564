"""Runs a script as a user does, in a process group of its own, which must be empty when it ends."""

import importlib
import os
import signal
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from tests import warm

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300.0


def run(*command: str | Path) -> str:
    """Return the output of a command. Raises AssertionError with that output if it fails."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    finally:
        left = kill_group(process.pid)
    assert process.returncode == 0, err
    assert not left, "it left processes behind"
    return out


def kill_group(leader: int) -> bool:
    """Kill the process group; whether there was any process."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def python(script: str, *arguments: str | Path) -> str:
    """Return the output of a script that starts warm. Raises AssertionError if it fails."""
    done = warm.run(script, *arguments, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def module(script: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script's module, in this process."""
    path = ROOT / script
    monkeypatch.syspath_prepend(str(path.parent))
    return importlib.import_module(path.stem)
