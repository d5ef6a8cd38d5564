"""Each end of a run has its message and exit code, and leaves no process behind."""

import os
import re
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from tests.kit.runs import PATIENCE_S, TINY, Run


def test_ctrl_c_says_what_will_happen_and_a_second_one_leaves_at_once_without_a_trace(
    tmp_path, monkeypatch
):
    temporary = Path(tempfile.mkdtemp())  # short, since sockets lie there
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    run = Run(*TINY, "--steps", "100000", folder=tmp_path / "run")
    run.until_step(2)
    run.strike("generator-0", signal.SIGSTOP)  # so that the step cannot be finished
    run.interrupt()
    run.until(lambda: re.search(r"SIGINT: .*sav.*; Ctrl-C again quits immediately", run.stdout))
    with pytest.raises(subprocess.TimeoutExpired):
        run.process.wait(0.3)
    run.interrupt()
    assert run.process.wait(PATIENCE_S) == 130
    how = r"(?:go on from step \d|nothing is saved; start again) with: (.*)"
    said = re.fullmatch(rf"\nquit immediately: the work after step \d is lost; {how}\n", run.stderr)
    assert said[1] == f"{run.json('config.json')['command']} --resume"
    run.assert_nothing_left()
    temporary.rmdir()  # which fails if the run left a file
    assert not (run.folder / "owner.json").exists()


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_all_processes_lets_the_run_save(number, tmp_path):
    run = Run(*TINY, "--steps", "100000", folder=tmp_path / "run")
    run.until_step(2)
    for pid in run.processes():
        os.kill(pid, number)
    assert run.wait() == 75
    run.assert_nothing_left()
    step = len(run.metrics())
    how = f"interrupted by {number.name} after step {step}"
    assert f"{how}; go on from step {step} with: " in run.stderr
    assert run.stderr.rstrip().endswith(f"--output-dir {run.folder} --resume")
    said = (run.folder / "logs" / "run.log").read_text()
    assert f"  {how}" in said
    assert "  step 1/100000 · reward " in said


@pytest.mark.long
@pytest.mark.parametrize(
    ("signals", "code"),
    [([signal.SIGINT], 130), ([signal.SIGINT, signal.SIGINT], 130), ([signal.SIGUSR1], 75)],
)
def test_a_signal_during_the_start_leaves_nothing(tmp_path, signals, code):
    run = Run(*TINY, folder=tmp_path / "run")
    run.until(lambda: (run.folder / "logs" / "trainer-0.log").exists())
    for number in signals:
        run.process.send_signal(number)
        time.sleep(0.1)
    assert run.wait() == code
    run.assert_nothing_left()
    said = f"interrupted by {signals[0].name} after step 0; nothing is saved; start again with: "
    assert len(signals) > 1 or said in run.stderr
