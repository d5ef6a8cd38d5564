"""Processes of the checks: start, deadline, end. Imports no torch."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from scripts.gpu_check.checks import Check
from scripts.gpu_check.verdicts import Verdict

MARK = "TILLER_GPU_CHECK"
"""Variable in the environment of a check's processes, by which those that it left are found."""


def run_check(check: Check, command: Sequence[str], folder: Path, *, device: str) -> Verdict:
    """Run a check by ``command``, in a process of its own; ``folder`` gets its log and files."""
    folder.mkdir(parents=True)
    result = folder / "verdict.json"
    mark = f"{os.getpid()}-{check.name}"
    environment = os.environ | {"OMP_NUM_THREADS": "1", MARK: mark}
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with (folder / "log").open("w") as log, _tidied(folder), _ended(mark):
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,  # a terminal is for the program alone
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            process.wait(timeout=check.seconds)
        except subprocess.TimeoutExpired:
            where = f"the last line of {folder / 'log'} is: {last_line(folder / 'log')}"
            return Verdict(wrong=f"did not end within {check.seconds:.0f} s; {where}")
    if result.exists():
        return Verdict(**json.loads(result.read_text()))
    code = process.returncode
    ended = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    where = f"the last line of {folder / 'log'} is: {last_line(folder / 'log')}"
    return Verdict(wrong=f"its process {ended} without a result; {where}")


def write_verdict(folder: Path, verdict: Verdict) -> None:
    """Write the result of the check that runs in this process, whole or not at all."""
    part = folder / "verdict.part"
    part.write_text(json.dumps(asdict(verdict)))
    part.rename(folder / "verdict.json")


def last_line(log: Path) -> str:
    """Return the last line of a log that is not empty."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "(empty)")


@contextmanager
def _tidied(folder: Path) -> Iterator[None]:
    """Delete the weights that a check leaves after the block; what explains its verdict stays."""
    try:
        yield
    finally:
        for name in ("weights", "session/checkpoints", "run/checkpoints"):
            shutil.rmtree(folder / name, ignore_errors=True)


@contextmanager
def _ended(mark: str) -> Iterator[None]:
    """End all processes with ``mark`` after the block, whatever session they are in."""
    try:
        yield
    finally:
        deadline = time.monotonic() + 10
        while (left := marked(mark)) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)


def marked(mark: str) -> list[int]:
    """Return the processes whose environment has ``mark``, without those that have ended."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended, or is another user's
            if f"{MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return found
