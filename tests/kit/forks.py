"""Processes that do not end, started by one that may end. This module imports little."""

import subprocess
import sys
import time
from pathlib import Path

FORKED = """
import os, sys, time
# The parent of the last process has ended; all but the first have their own sessions.
for generation in range(3):
    with open(sys.argv[1], "a") as file:
        file.write(f"{os.getpid()}\\n")
    if os.fork():
        time.sleep(3600 if generation < 1 else 0)
        sys.exit()
    os.setsid()
with open(sys.argv[1], "a") as file:
    file.write(f"{os.getpid()}\\n")
time.sleep(3600)
"""


def fork(folder: str) -> None:
    """Start processes that do not end, one of them a daemon, unless ``folder``/forked names so
    many. The caller of an earlier start may have been killed in between.
    """
    forked = Path(folder, "forked")
    forked.touch()
    if len(forked.read_text().splitlines()) >= 4:
        return
    subprocess.Popen([sys.executable, "-c", FORKED, str(forked)])
    while len(forked.read_text().splitlines()) < 4:
        time.sleep(0.01)
