"""Threads for code that may hang."""

import subprocess
import sys

import pytest

from rl.host.threads import DaemonThread

HANGS = """
import time
from rl.host.threads import DaemonThread
assert DaemonThread().submit(int, "7").result() == 7
DaemonThread().submit(time.sleep, 3600)
"""


def test_a_call_that_hangs_does_not_keep_a_program_from_ending():
    subprocess.run([sys.executable, "-c", HANGS], check=True, timeout=120)


def test_calls_run_one_after_the_other_until_the_thread_ends():
    thread = DaemonThread()
    seen = []
    calls = [thread.submit(seen.append, number) for number in range(3)]
    wrong = thread.submit(sys.exit, 3)
    calls[2].cancel()
    last = thread.submit(seen.append, 4)
    worker = thread._thread
    thread.shutdown()
    last.result(60)
    with pytest.raises(SystemExit):
        wrong.result(60)
    assert seen in ([0, 1, 2, 4], [0, 1, 4])
    worker.join(60)
    assert not worker.is_alive()
    assert thread.submit(int, "7").result(60) == 7
    thread.shutdown()
