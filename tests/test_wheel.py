"""The wheel works outside the repository."""

import os
import shutil
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

import pytest

from rl import train
from rl.__main__ import PROGRAMS

ROOT = Path(__file__).parents[1]
SOURCES = ("configs", "rl", "LICENSE", "README.md", "pyproject.toml")


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """Build the wheel from a copy of the sources and install it; return the folder."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in SOURCES:
        cached = shutil.ignore_patterns("__pycache__")
        copy = partial(shutil.copytree, ignore=cached) if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    offline = ["--no-deps", "--no-index", "--quiet", "--disable-pip-version-check"]
    pip(["wheel", ".", *offline, "--no-build-isolation", "--wheel-dir", "../dist"], source)
    (wheel,) = (folder / "dist").iterdir()
    pip(["install", str(wheel), *offline, "--target", "../target"], source)
    return folder / "target"


def pip(arguments: list[str], folder: Path) -> None:
    command = [sys.executable, "-m", "pip", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def tiller(installed, tmp_path):
    """Return a function that runs the command in an empty folder, without the repository."""

    def run(*arguments: str) -> subprocess.CompletedProcess:
        environment = os.environ | {"PYTHONPATH": str(installed)}
        command = [sys.executable, "-P", str(installed / "bin" / "tiller"), *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )

    return run


def test_the_wheel_has_every_module_and_data_file(installed):
    paths = [path for folder in ("rl", "configs") for path in (ROOT / folder).rglob("*.*")]
    names = [path.relative_to(ROOT) for path in paths if path.suffix != ".pyc"]
    assert [str(name) for name in names if not (installed / name).is_file()] == []


def test_help_of_a_program_is_that_of_python_m(tiller, capsys):
    done = tiller("train", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    with pytest.raises(SystemExit):
        train.main(["--help"])
    assert done.stdout == capsys.readouterr().out


@pytest.mark.long
def test_a_shipped_config_is_planned(tiller, tmp_path):
    done = tiller("plan", "--config", "quickstart")
    assert (done.returncode, done.stderr) == (0, "")
    assert "quickstart" in done.stdout
    assert [*tmp_path.iterdir()] == []


def test_configs_of_the_user_are_not_shadowed(installed, tiller, tmp_path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mine.py").write_text("NAME = 'mine'\n")
    code = (
        "import configs.mine, importlib.util as u; print(u.find_spec('configs.quickstart').origin)"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{installed}"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, cwd=tmp_path, capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout == f"{installed / 'configs' / 'quickstart.py'}\n", done.stderr


def test_the_version_is_that_of_pyproject(tiller):
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert tiller("--version").stdout == f"tiller {version}\n"


def test_every_program_is_listed(tiller):
    text = tiller("--help").stdout
    # these are started by other programs
    inner = ("node", "launcher", "solver", "judge", "rehearse", "algebra")
    for path in (ROOT / "rl").rglob("*.py"):
        name = path.parent.name if path.name == "__main__.py" else path.stem
        if "\nif __name__ ==" in path.read_text() and name not in inner:
            assert name == "rl" or f"\n  {name} " in text
    for name in PROGRAMS:
        assert (ROOT / "rl" / f"{name}.py").exists() or (ROOT / "rl" / name).is_dir()


def test_an_unknown_program_is_refused(tiller):
    done = tiller("tarin")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: unknown program 'tarin'; did you mean train? there are train, plan, doctor, "
        "launch, evaluate, view, play, serve, replay, compare, export\n"
    )
