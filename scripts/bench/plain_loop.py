"""CPU-seconds to learn the quickstart's task, against a GRPO loop in PyTorch alone.

Usage: python scripts/bench/plain_loop.py [--rounds N] [--only SIZE ...] [--json]

Both sides train a Qwen3 by GRPO with an entropy bonus, 32 prompts x 8 completions a step, and
evaluate greedily on 256 held-out prompts after every ten steps, until the exact match is at least
0.9. The model has the 100 thousand parameters of the quickstart, or the layers of against_trl.py,
3.1 million parameters, where most of the time goes to matrix products. The plain side is one
process without actors, push or engine (plain_grpo.py). Counted is the CPU time of all processes
from their start, so that imports count; Tiller's last checkpoint and export do not. The sides run
by turns, with one thread a process; each round has another seed.
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
from plain_sizes import SIZES
from programs import STOP_S, cpu_seconds, output_of, rows_of

HERE = Path(__file__).parent
EXACT_MATCH = 0.9
EVERY = 10
TIMEOUT_S = 600.0


def run_plain(size: str, seed: int) -> dict[str, float]:
    """Return CPU-seconds, steps and exact match of the plain loop."""
    arguments = [str(seed), str(EXACT_MATCH), str(EVERY), size]
    command = [sys.executable, HERE / "plain_grpo.py", *arguments]
    return dict(json.loads(output_of(command, TIMEOUT_S).splitlines()[-1]))


def run_ours(size: str, seed: int, folder: Path) -> dict[str, float]:
    """Return the same of a run of Tiller, which is ended once it has learned."""
    model = {f"model.{name}": value for name, value in asdict(SIZES[size]).items()}
    rate = {"trainer.optimizer.param_groups.0.optimizer_kwargs.lr": model.pop("model.lr")}
    fields = {"seed": seed, "output-dir": folder, "steps": 400, **model, **rate}
    evaluates = {"evaluation.every": EVERY, "evaluation.samples": 0}
    options = [
        str(word) for name, value in (fields | evaluates).items() for word in (f"--{name}", value)
    ]
    command = [sys.executable, "-m", "rl.train", "--config", "quickstart", *options]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = psutil.Popen(command, **quiet)
    deadline = time.monotonic() + TIMEOUT_S
    try:
        while process.poll() is None and time.monotonic() < deadline:
            spent = cpu_seconds(process)
            for row in rows_of(folder / "evaluations.jsonl"):
                match = row["eval/exact_match"]
                if match >= EXACT_MATCH:
                    return {"cpu_s": spent, "steps": row["step"], "exact_match": match}
            time.sleep(0.1)
        raise SystemExit(f"plain_loop: this did not learn: {shlex.join(command)}")
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(STOP_S)


def compare(size: str, seeds: range, folder: Path) -> dict[str, Any]:
    """Measure both sides alternately. Return the median ratio, its extremes and medians."""
    found: dict[str, list[dict[str, float]]] = {"plain": [], "ours": []}
    for seed in seeds:
        found["plain"].append(run_plain(size, seed))
        found["ours"].append(run_ours(size, seed, folder / f"{size}-{seed}"))
        for name, rows in found.items():
            line = f"{rows[-1]['cpu_s']:7.1f} CPU-s, {rows[-1]['steps']:.0f} steps"
            print(f"{size:5}{name:6}{line}", flush=True)
    ratios = [
        ours["cpu_s"] / plain["cpu_s"]
        for plain, ours in zip(found["plain"], found["ours"], strict=True)
    ]
    return {
        "ours_over_plain": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        **{
            f"{key}_{name}": statistics.median(row[key] for row in rows)
            for name, rows in found.items()
            for key in ("cpu_s", "steps")
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns that each side takes")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first round")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    parser.add_argument("--only", nargs="+", choices=SIZES, default=[*SIZES], help="sizes")
    arguments = parser.parse_args()
    seeds = range(arguments.seed, arguments.seed + arguments.rounds)
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in arguments.only:
            found = compare(size, seeds, Path(folder))
            suffix = "" if size == "0.1m" else f"_{size}"
            result |= {f"{name}{suffix}": value for name, value in found.items()}
    print(json.dumps(result) if arguments.json else result)


if __name__ == "__main__":
    main()
