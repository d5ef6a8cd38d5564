"""A model with data on which nothing is wrong, and calls of the program."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from rl.doctor.__main__ import main
from tests.bench.programs import module

Doctor = Callable[..., tuple[int, list[dict]]]


@pytest.fixture(scope="session")
def good_inputs(tmp_path_factory) -> Path:
    """Folder with a model, ``tiny``, and problems, ``tiny.jsonl``."""
    folder = tmp_path_factory.mktemp("inputs")
    with pytest.MonkeyPatch.context() as patch:
        script = module("scripts/make_tiny_model.py", patch)
    script.main(["--model-dir", str(folder / "tiny"), "--data", str(folder / "tiny.jsonl")])
    return folder


@pytest.fixture
def inputs(good_inputs, tmp_path) -> Path:
    """Copy of ``good_inputs`` for a test to damage."""
    return shutil.copytree(good_inputs, tmp_path / "inputs")


@pytest.fixture
def doctor(capsys, tmp_path, monkeypatch) -> Doctor:
    """Return a function that runs the program in an empty folder and returns the exit code and
    the findings.
    """
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def run(*arguments: str | Path) -> tuple[int, list[dict]]:
        code = main([*map(str, arguments), "--json"])
        *_, counts, last = capsys.readouterr().out.splitlines()
        said = json.loads(last)
        assert said["ok"] == (code == 0)
        assert re.search(r"\b1 \w+s\b", counts) is None, counts
        assert not list(folder.iterdir()), "the program writes nothing"
        return code, said["findings"]

    return run


@pytest.fixture
def matches() -> Callable[..., None]:
    """Return a function that asserts that one finding was made, and which."""

    def check(found: list, severity: str, where: str, what: str, fix: str) -> None:
        rows = [each if isinstance(each, dict) else asdict(each) for each in found]
        assert len(rows) == 1, rows
        assert (rows[0]["severity"], rows[0]["where"]) == (severity, where), rows
        assert re.search(what, rows[0]["what"]), rows
        assert re.search(fix, rows[0]["fix"]), rows

    return check
