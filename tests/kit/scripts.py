"""Runs a script as a user does, in a process group of its own, which must be empty when it ends."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from tests import warm

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300.0


def python(program: str, *arguments: str | Path) -> str:
    """Return the output of a program that starts warm. Raises AssertionError if it fails."""
    done = warm.run(program, *arguments, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def module(script: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script's module, in this process."""
    path = ROOT / script
    monkeypatch.syspath_prepend(str(path.parent))
    return importlib.import_module(path.stem)
