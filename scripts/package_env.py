"""Environments for packages that are not installed beside Tiller, as other products are."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

UV = "uv==0.13.8"


def environment_python(
    folder: Path, packages: Sequence[str], *, alone: Sequence[str] = (), name: str
) -> Path:
    """Return the interpreter of the environment in ``folder``. Make the environment, from the
    package index that pip is configured for, if it is missing or has other packages.

    The requirements of the packages ``alone`` are not installed. Raises SystemExit with the
    installer's output, and what ``name`` says was to be installed, if that fails.
    """
    folder = folder.expanduser()
    python = folder / "bin" / "python"
    stamp = folder / "stamp"
    wanted = "\n".join([*packages, *alone])
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"installing {packages[0]} into {folder}", file=sys.stderr, flush=True)
    links = os.environ.get("PIP_FIND_LINKS", "").split()  # uv does not read pip's settings
    where = [word for link in links for word in ("--find-links", link)] or ["--torch-backend=cpu"]
    install = [folder / "bin" / "uv", "pip", "install", "--quiet", "--python", python, *where]
    commands = [
        [sys.executable, "-m", "venv", "--clear", folder],
        [python, "-m", "pip", "install", "--quiet", UV],
        [*install, *packages],
    ]
    if alone:
        commands.append([*install, "--no-deps", *alone])
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            said = f"{done.stdout}{done.stderr}"
            raise SystemExit(f"{said}{name} could not be installed into {folder}")
    stamp.write_text(wanted)
    return python
