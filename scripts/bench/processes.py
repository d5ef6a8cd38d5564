"""CPU time and wall time of a start and of a step, by process.

Usage: python scripts/bench/processes.py [--steps N] [--only NAME ...] [--json]

Trains the quickstart and the model of against_trl.py (3.3 million parameters), each in lockstep and
with rollout.max_staleness 1. A start lasts from the command to the first row of metrics, and has
one step. The steps after WARM_UP are averaged; none has an evaluation or a checkpoint. The kernel
counts the CPU time of each process.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil
from against_trl import write_model
from programs import STOP_S, rows_of

HERE = Path(__file__).parent
WARM_UP = 10
TIMEOUT_S = 600.0
LOG = "TILLER_LOG"
"""Variable of Tiller's processes that names their log."""


def runs(model: Path) -> dict[str, list[str]]:
    """Return the arguments of each run by name."""
    models = {
        "quickstart": ["--config", "quickstart", "--evaluation.every", "0"],
        "3.3M": ["--config", "grpo_ours.uniform", "--model.hf_path", str(model)],
    }
    ahead = ["--rollout.max_staleness", "1"]
    return {
        f"{name}, {way}": [*arguments, *options]
        for name, arguments in models.items()
        for way, options in (("lockstep", []), ("one step ahead", ahead))
    }


def spent(process: psutil.Process) -> dict[str, float]:
    """Return the CPU seconds of a run's processes by name."""
    seconds: dict[str, float] = defaultdict(float)  # children of an executed rank inherit its log
    for each in (process, *process.children(recursive=True)):
        times = each.cpu_times()
        name = "controller" if each == process else each.name()  # a forked rank has a name
        if log := each.environ().get(LOG):
            name = Path(log).stem
        seconds[name] += times.user + times.system
    return dict(seconds)


def measure(arguments: list[str], steps: int, folder: Path) -> dict[str, Any]:
    """Return seconds of a start and of a step: on the wall, and of CPU by process."""
    checkpoint = ["--trainer.checkpoint.interval", str(10**6)]
    options = ["--steps", str(10**5), "--output-dir", str(folder), *checkpoint]
    command = [sys.executable, "-m", "rl.train", *arguments, *options]
    paths = os.pathsep.join(map(str, (HERE.parents[1], HERE)))
    environment = os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
    began = time.monotonic()
    with (folder.parent / "said.log").open("w") as said:
        process = psutil.Popen(command, env=environment, stdout=said, stderr=said)
    try:
        start = _after(process, folder, 1, began)
        warm = _after(process, folder, WARM_UP, began)
        end = _after(process, folder, WARM_UP + steps, began)
    finally:
        process.terminate()
        process.wait(STOP_S)
    count = end["steps"] - warm["steps"]
    return {
        "start_wall_s": start["wall_s"],
        "start_cpu_s": start["cpu_s"],
        "step_wall_s": (end["wall_s"] - warm["wall_s"]) / count,
        "step_cpu_s": {
            name: (seconds - warm["cpu_s"][name]) / count for name, seconds in end["cpu_s"].items()
        },
    }


def _after(process: psutil.Popen, folder: Path, steps: int, began: float) -> dict[str, Any]:
    """Wait for a number of steps; return steps, wall seconds, and CPU seconds by process."""
    while time.monotonic() - began < TIMEOUT_S and process.poll() is None:
        if (done := len(rows_of(folder / "metrics.jsonl"))) >= steps:
            wall = time.monotonic() - began
            return {"steps": done, "wall_s": wall, "cpu_s": spent(process)}
        time.sleep(0.02)
    raise SystemExit(f"processes: {(folder.parent / 'said.log').read_text()}")


def show(name: str, found: dict[str, Any]) -> None:
    for what in ("start", "step"):
        wall = found[f"{what}_wall_s"]
        cpu = found[f"{what}_cpu_s"]
        parts = ", ".join(f"{process} {seconds:.3f}" for process, seconds in cpu.items())
        total = sum(cpu.values())
        print(f"{name}: {what} {wall:.3f} s, {total:.3f} s of CPU: {parts}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60, help="steps that are averaged")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="words in the names of the runs")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    arguments = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        write_model(model)
        for number, (name, options) in enumerate(runs(model).items()):
            if arguments.only is None or any(word in name for word in arguments.only):
                own = Path(folder, str(number))
                own.mkdir()
                found[name] = measure(options, arguments.steps, own / "run")
                show(name, found[name])
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
