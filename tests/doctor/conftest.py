"""A model with data on which nothing is wrong, and calls of the program."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from rl.config import RunConfig
from rl.doctor import host
from rl.doctor.__main__ import main
from rl.doctor.examine import check_all
from rl.doctor.host import Host
from rl.host.cpu_speed import CpuSpeed
from tests.kit.scripts import module

Doctor = Callable[..., tuple[int, list[dict]]]
Examine = Callable[[str, RunConfig], list[dict]]


@pytest.fixture(scope="session")
def this_host() -> Host:
    return host.this_host()


@pytest.fixture(autouse=True)
def alike_in_bfloat16(monkeypatch) -> None:
    """Have the processor compute as fast in bfloat16 as in float32, whatever it is."""
    monkeypatch.setattr("rl.session.hardware.cpu_speed", lambda: CpuSpeed(0.1, 0.1, 10.0, 0.1))


@pytest.fixture(scope="session")
def good_inputs(tmp_path_factory) -> Path:
    """Folder with a model, ``tiny``, and problems, ``tiny.jsonl``."""
    folder = tmp_path_factory.mktemp("inputs")
    with pytest.MonkeyPatch.context() as patch:
        script = module("scripts/make_tiny_model.py", patch)
    script.main(["--model-dir", str(folder / "tiny"), "--data", str(folder / "tiny.jsonl")])
    return folder


@pytest.fixture
def doctor(capsys, tmp_path, monkeypatch, this_host) -> Doctor:
    """Return a function that runs the program in an empty folder and returns the exit code and
    the findings. The facts of the host are read once for all tests.
    """
    monkeypatch.setattr("rl.doctor.host.this_host", lambda: this_host)
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
def examine(this_host, tmp_path, monkeypatch) -> Examine:
    """Return a function that returns the different findings of a config in an empty folder."""
    folder = tmp_path / "there"
    folder.mkdir()
    monkeypatch.chdir(folder)

    def run(name: str, config: RunConfig) -> list[dict]:
        findings = check_all(this_host, name, config)
        found = {each.what: asdict(each) for each in findings if each.severity != "note"}
        assert not list(folder.iterdir()), "the checks write nothing"
        return [*found.values()]

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
