"""Programs that benchmarks start: their output, and the CPU time of their processes."""

import contextlib
import json
import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

# without cached bytecode every process starts seconds later
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

TIMEOUT_S = 1800.0
STOP_S = 60.0
"""Time in which a program that was told to end does so, with its processes, in seconds."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}


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
        raise _failure(command, done.returncode, done.stderr)
    return done.stdout


def _failure(command: Sequence[str | Path], code: int | None, errors: str) -> SystemExit:
    """Return the error of a program that failed; ``code`` is None if the program still runs."""
    how = "has not ended" if code is None else f"ended with exit code {code}"
    return SystemExit(f"{errors}this {how}: {shlex.join(map(str, command))}")


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a JSONL file, if it exists."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU seconds that a process and its living descendants have used."""
    total = 0.0
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # the process has ended
            times = each.cpu_times()
            total += times.user + times.system
    return total


def run_watched(
    command: Sequence[str | Path], progress: Path, marks: tuple[int, int], **variables: str
) -> tuple[str, float]:
    """Return the output of a command, and the CPU seconds of all its processes between the steps
    of ``marks``. Each step adds a line to ``progress``.

    Raises SystemExit with its errors if it fails.
    """
    spent: dict[int, float] = {}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        environment = {**os.environ, **OFFLINE, **variables}
        process = psutil.Popen([*map(str, command)], env=environment, stdout=out, stderr=err)
        end = time.monotonic() + TIMEOUT_S
        while process.poll() is None and time.monotonic() < end:
            done = len(progress.read_text().splitlines()) if progress.exists() else 0
            for step in marks:
                if done >= step and step not in spent:
                    spent[step] = cpu_seconds(process)
            time.sleep(0.02)
        err.seek(0)
        out.seek(0)
        code = process.poll()
        if code != 0 or len(spent) < len(marks):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
            raise _failure(command, code, err.read())
        return out.read(), spent[marks[1]] - spent[marks[0]]
