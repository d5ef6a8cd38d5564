"""An EnvServer of verifiers, in an environment of its own: its packages exclude Tiller's."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.kit.packages import verifiers_python

OURS = Path(__file__).parent / "verifiers_env"


@dataclass
class Served:
    address: str
    tasks: Path
    """JSONL file with the data of the tasks."""


@contextlib.contextmanager
def served(folder: Path) -> Iterator[Served]:
    """Serve the taskset of ``verifiers_env`` while the block runs."""
    tasks = folder / "tasks.jsonl"
    process = subprocess.Popen(
        [verifiers_python(), OURS / "serve.py", tasks],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(OURS), "HOME": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        address = process.stdout.readline().strip()
        assert address, "the server printed no address"
        yield Served(address, tasks)
    finally:
        process.kill()
        process.communicate()
