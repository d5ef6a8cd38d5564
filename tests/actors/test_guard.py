"""Processes that a guarded process has started end with that process and with its parent."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from rl.actors import guard
from tests.kit.forks import __file__ as forks
from tests.kit.processes import assert_ended, wait_until_delivered

GUARDED = f"""
import os, sys
{Path(guard.__file__).read_text()}
guard()
sys.path.insert(0, {str(Path(forks).parents[2])!r})
from tests.kit.forks import fork
fork(sys.argv[1])
print("forked", flush=True)
"""
ENDINGS = {
    "returns": ("sys.exit(7)", 7),
    "is killed": ("os.kill(os.getpid(), signal.SIGKILL)", 137),
    "hangs": ("time.sleep(3600)", 143),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_children_and_daemons_end_with_the_guarded_process(ending, tmp_path):
    code, status = ENDINGS[ending]
    with subprocess.Popen(
        [sys.executable, "-c", GUARDED + code, str(tmp_path)], stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout.readline() == b"forked\n"
            if ending == "hangs":
                process.terminate()
            assert process.wait(60) == status
        finally:
            process.terminate()
    asyncio.run(assert_ended([int(pid) for pid in (tmp_path / "forked").read_text().split()]))


def test_sigterm_of_another_process_does_not_end_a_guard(tmp_path):
    code = GUARDED + "print(sys.stdin.readline(), end='')"
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=pipe, stdout=pipe, text=True
    ) as process:
        assert process.stdout.readline() == "forked\n"
        subprocess.run(["kill", "-TERM", str(process.pid)], check=True)
        wait_until_delivered(process.pid)
        assert process.communicate("goes on\n", timeout=60)[0] == "goes on\n"
        assert process.returncode == 0


def test_children_and_daemons_end_with_a_parent_that_is_killed(tmp_path):
    code = GUARDED + "time.sleep(3600)"
    starts = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}, sys.argv[1]])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", starts, str(tmp_path)], stdout=subprocess.PIPE
    ) as parent:
        try:
            assert parent.stdout.readline() == b"forked\n"
        finally:
            parent.kill()
    asyncio.run(assert_ended([int(pid) for pid in (tmp_path / "forked").read_text().split()]))
