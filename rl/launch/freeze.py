"""State of a launch that a run keeps in its folder: config, script and environment."""

import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rl.config import RunConfig
from rl.config.frozen import frozen
from rl.errors import RunError
from rl.host.disk import failing_loudly

SOURCE = Path(__file__).parents[2]
"""Folder of rl/ and configs/."""
NODE = SOURCE / "rl" / "launch" / "node.py"
"""Program of a node's worker."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One run to launch."""

    name: str
    config: RunConfig
    folder: Path
    """Folder of the run, absolute, on the machines that run it."""
    command: str
    """Command line that launched the run."""
    home: Path | None = None
    """Folder of the frozen files' folder on this host; None for the folder of the run."""

    @property
    def files(self) -> Path:
        """Folder of the frozen files."""
        return (self.home or self.folder) / "launch"

    @property
    def frozen(self) -> str:
        """The frozen config, as the text of ``config.json``."""
        return as_json({"name": self.name, "command": self.command, "config": frozen(self.config)})

    def train(self, python: str = sys.executable, config: str = "") -> list[str]:
        """Return the command of the run, without ``--resume``. ``config`` is the path of
        ``config.json``, by default that of the frozen file.
        """
        path = config or str(self.files / "config.json")
        return [python, "-m", "rl.train", "--config", path, "--output-dir", str(self.folder)]

    def freeze(self, texts: dict[str, str]) -> None:
        """Write ``config.json``, ``environment.json``, and each of ``texts`` to its key's file."""
        texts = {"config.json": self.frozen, "environment.json": as_json(environment()), **texts}
        with failing_loudly(self.files):
            self.files.mkdir(parents=True, exist_ok=True)
        for path, text in ((self.files / name, text) for name, text in texts.items()):
            with failing_loudly(path):
                path.write_text(text, encoding="utf-8")

    def show(self, *, end: str, follow: str = "") -> None:
        """Print the run's folder and the commands that follow and end the run."""
        print(f"run folder: {self.folder}")
        if follow:
            print(f"follow it:  {follow}")
        print(f"end it:     {end}")


def environment() -> dict[str, object]:
    """Return the versions of code and packages, and the names of the environment's variables.

    Values of variables may be secrets and are left out.
    """
    packages = {dist.metadata["Name"]: dist.version for dist in importlib.metadata.distributions()}
    return {
        "python": sys.version,
        "source": str(SOURCE),
        "commit": _git("rev-parse", "HEAD"),
        "changed_files": _git("status", "--short").splitlines(),
        "folder": os.getcwd(),
        "variables": sorted(os.environ),
        "packages": dict(sorted(packages.items())),
    }


def _git(*arguments: str) -> str:
    """Return git's answer about the source; empty without git or a repository."""
    try:
        answer = subprocess.run(
            ["git", "--no-optional-locks", *arguments],
            cwd=SOURCE,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip()


def as_json(content: object) -> str:
    """Return ``content`` as the text of a file."""
    return json.dumps(content, indent=2) + "\n"


def run_command(*command: str, remedy: str) -> str:
    """Return the output of a command. Raises RunError with the command's message if it fails, and
    with ``remedy`` if it is not on PATH.
    """
    try:
        answer = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise RunError(f"{command[0]} is not on PATH: {remedy}") from error
    if answer.returncode:
        raise RunError(f"{shlex.join(command)} failed: {answer.stderr.strip()}")
    return answer.stdout.strip()
