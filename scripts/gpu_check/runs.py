"""Checks on whole runs of ``python -m rl.train``.

On a GPU none of them has been run; with the stand-in device the same lines run on CPU.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.gpu_check import verdicts
from scripts.gpu_check.setting import Setting
from scripts.gpu_check.verdicts import Verdict


def start(setting: Setting, config: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a run in the folder ``run``; it prints to the log of this check."""
    name = f"scripts.gpu_check.run_configs.{config}"
    command = [sys.executable, "-m", "rl.train", "--config", name, *arguments]
    return subprocess.Popen([*command, "--output-dir", str(setting.folder / "run")])


def rows_of(folder: Path) -> list[dict[str, float]]:
    """Return the complete rows of metrics.jsonl."""
    path = folder / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def failure_of(setting: Setting, code: int) -> str:
    """Return why a run ended with ``code``; empty for 0."""
    path = setting.folder / "run" / "failure.json"
    if code == 0:
        return ""
    said = json.loads(path.read_text())["error"] if path.exists() else "see its log"
    return f"the run ended with exit code {code}: {said}"


def devices(gpus: int) -> tuple[str, ...]:
    """Return the options for trainer and generator on one GPU in turns, or on GPUs of their
    own.
    """
    if gpus <= 1:
        return ("--colocate", "all")
    return ("--rollout.max_staleness", "1", "--generator.replicas", str(gpus - 1))


async def grpo(
    setting: Setting, *, gpus: int = 1, steps: int = 10, fields: Sequence[str] = ()
) -> Verdict:
    """Train the layers of Qwen3-0.6B from random weights to copy digits, with more ``fields``."""
    config = "copying_0_6b" if setting.cuda else "copying"
    dtype = "bfloat16" if setting.cuda else "float32"
    code = start(setting, config, "--steps", str(steps), *devices(gpus), *fields).wait()
    wrong = failure_of(setting, code)
    verdict = verdicts.of_run(rows_of(setting.folder), steps, dtype)
    return Verdict(wrong=wrong or verdict.wrong, said=verdict.said, numbers=verdict.numbers)


async def resume(setting: Setting, *, steps: int = 12, kill_after: int = 6) -> Verdict:
    """Kill a run with SIGKILL after a step that follows a checkpoint, and resume it."""
    interval = ("--trainer.checkpoint.interval", "4")
    options = ("copying", "--steps", str(steps), *devices(1), *interval)
    run = start(setting, *options)
    while run.poll() is None and len(rows_of(setting.folder)) < kill_after:
        time.sleep(0.1)
    if run.poll() is not None:
        wrong = failure_of(setting, run.returncode)
        return Verdict(wrong=wrong or f"the run ended before step {kill_after}")
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    begin = time.perf_counter()
    code = start(setting, *options, "--resume").wait()
    wrong = failure_of(setting, code)
    verdict = verdicts.of_run(rows_of(setting.folder), steps, "float32")
    seconds = time.perf_counter() - begin
    return Verdict(
        wrong=wrong or verdict.wrong,
        said=f"killed after step {kill_after}, then steps to {steps} in {seconds:.0f} s",
        numbers=verdict.numbers | {"resumed_s": seconds},
    )
