"""CPU time of programs that start other processes."""

import contextlib
import os

import psutil

# without cached bytecode every process starts seconds later
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU seconds that a process and its living descendants have used."""
    total = 0.0
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # the process has ended
            times = each.cpu_times()
            total += times.user + times.system
    return total
