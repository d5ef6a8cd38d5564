"""State of the launch that a run keeps in its folder: config, script,
environment.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rl.config import RLConfig
from rl.frozen import frozen
from rl.observe.record import failing_loudly

SOURCE = Path(__file__).parents[2]
"""Folder of rl/ and configs/."""
NODE = SOURCE / "rl" / "launch" / "node.py"
"""Program of a node's worker."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One run, on its way."""

    name: str
    config: RLConfig
    folder: Path
    """Folder of the run, absolute."""
    command: str
    """Command line that launched the run."""

    @property
    def files(self) -> Path:
        """The folder of what is frozen."""
        return self.folder / "launch"

    def train(self, python: str = sys.executable) -> list[str]:
        """The command of the run, but for ``--resume``."""
        config = str(self.files / "config.json")
        return [python, "-m", "rl.train", "--config", config, "--output-dir", str(self.folder)]

    def freeze(self, texts: dict[str, str]) -> None:
        """Write config and environment, and ``texts`` by file name."""
        with failing_loudly(self.files):
            self.files.mkdir(parents=True, exist_ok=True)
        copy = {"name": self.name, "command": self.command, "config": frozen(self.config)}
        written = {
            "config.json": as_json(copy),
            "environment.json": as_json(environment()),
            **texts,
        }
        for name, text in written.items():
            with failing_loudly(self.files / name):
                (self.files / name).write_text(text, encoding="utf-8")


def environment() -> dict[str, object]:
    """Which code runs, on what. Of variables the names alone: their values may be secrets."""
    packages = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
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
    """Its answer about the source; empty where that is no repository, or git is not there."""
    try:
        answer = subprocess.run(
            ["git", *arguments], cwd=SOURCE, capture_output=True, text=True, timeout=10
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip()


def as_json(content: object) -> str:
    """Return ``content`` as the text of a file."""
    return json.dumps(content, indent=2) + "\n"
