"""Programs that benchmarks start: their output, and the CPU time of their processes."""

import contextlib
import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil

# without cached bytecode every process starts seconds later
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def output_of(command: Sequence[str | Path], timeout_s: float, **variables: str) -> str:
    """Return what a program prints. Raises SystemExit with its errors if it fails.

    Args:
        command: program and arguments.
        timeout_s: seconds after which the program is killed.
        variables: environment variables besides those of this process.
    """
    done = subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, timeout=timeout_s
    )
    if done.returncode:
        raise SystemExit(f"{done.stderr}this failed: {shlex.join(map(str, command))}")
    return done.stdout


def cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU seconds that a process and its living descendants have used."""
    total = 0.0
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # the process has ended
            times = each.cpu_times()
            total += times.user + times.system
    return total
