"""Scripts: run as a user does, in a process group that must be empty at the end, or imported."""

import importlib
from collections.abc import Iterator
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
    """Return a script's module, in this process."""
    path = ROOT / script
    monkeypatch.syspath_prepend(str(path.parent))
    return importlib.import_module(path.stem)


def module_fixture(script: str, scope: str = "function"):
    """Return a fixture whose value is the module of ``script``."""

    @pytest.fixture(scope=scope)
    def loaded() -> Iterator[ModuleType]:
        with pytest.MonkeyPatch.context() as patch:
            yield module(script, patch)

    return loaded
