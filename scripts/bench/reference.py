"""Reference curves: whether configs that ship learn here as they did when docs/reference.json was
recorded.

Usage: python scripts/bench/reference.py [--only NAME ...] [--seeds SEED ...] [--write] [--json]

Trains the configs of RUNS from random weights, and reads PARTS means of a metric and a score of
held-out data from each run. A run agrees if each of these figures is within WIDTH spreads of the
recorded mean, for a part at least those of all parts in quadratic mean; the exit code is 1 if a run
does not. With --write, trains five seeds and writes
docs/reference.json, the picture, and the table of docs/reference.md.
"""

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from algorithms import ROOT, VARIABLES, train

RUNS = {
    "quickstart": (200, "reward/mean", "eval/exact_match"),
    "tool_demonstrations": (30, "loss/mean", "eval/loss"),
    "tool_quickstart": (20, "reward/mean", "eval/exact_match"),
}
"""Steps, metric of a step, and score of held-out data, by config."""
PARTS = 10
SHOWN = (0, 2, 4, 9)
"""Parts in the table."""
SEEDS = range(5)
WIDTH = 4.0
LEAST = 0.01
"""Smallest spread, for figures that all seeds agree in."""
DOCS = ROOT / "docs"
RECORD = DOCS / "reference.json"
PLACE = re.compile(r"(?<=<!-- reference -->\n).*?(?=<!-- end of reference -->)", re.DOTALL)


def inputs(name: str, folder: Path) -> list[str]:
    """Return the arguments that name model and data of a config; make these if they are missing."""
    if name == "tool_demonstrations":
        model, data = str(folder / "model"), str(folder / "sums.jsonl")
        written = ["--model-dir", model, "--data", data]
        command = [sys.executable, ROOT / "scripts/make_tiny_model.py", "--calculator", *written]
        if not Path(model).exists():
            env = os.environ | VARIABLES
            lines = ["--lines", "600"]
            subprocess.run([*command, *lines], env=env, stdout=subprocess.DEVNULL, check=True)
        return ["--model.hf_path", model, "--task.path", data]
    if name == "tool_quickstart":
        shown = folder / "shown"
        if not shown.exists():
            train("tool_demonstrations", 0, shown, inputs("tool_demonstrations", folder))
        return ["--model.hf_path", str(shown / "export")]
    return []


def measure(name: str, seed: int, folder: Path) -> list[float]:
    """Train; return the figures of the run: the mean of each part, and the score."""
    steps, metric, score = RUNS[name]
    options = ["--steps", str(steps), "--trainer.checkpoint.no-enable", *inputs(name, folder)]
    rows, summary = train(name, seed, folder / f"{name}-{seed}", options)
    size = steps // PARTS
    values = [row[metric] for row in rows]
    parts = [statistics.mean(values[part * size : (part + 1) * size]) for part in range(PARTS)]
    return [round(value, 4) for value in (*parts, summary[score])]


def bands(runs: list[list[float]]) -> list[tuple[float, float]]:
    """Return mean and spread (standard deviation) of each figure."""
    return [
        (statistics.mean(figures), statistics.stdev(figures)) for figures in zip(*runs, strict=True)
    ]


def differences(figures: list[float], runs: list[list[float]]) -> list[str]:
    """Return a line for each figure of a run that is too far from those of ``runs``."""
    recorded = bands(runs)
    overall = math.sqrt(statistics.mean(spread**2 for _, spread in recorded[:PARTS]))
    found = []
    for number, (value, (mean, spread)) in enumerate(zip(figures, recorded, strict=True)):
        is_part = number < PARTS
        if abs(value - mean) > WIDTH * max(spread, LEAST, overall if is_part else 0.0):
            what = f"part {number + 1} of {PARTS}" if is_part else "score"
            found.append(f"{what}: {value:.4f}, recorded {mean:.4f} ± {spread:.4f}")
    return found


def table(record: dict[str, list[list[float]]]) -> str:
    """Return the table of docs/reference.md."""
    parts = " | ".join(f"{(part + 1) / PARTS:.0%}" for part in SHOWN)
    lines = [f"| config | metric | {parts} | held out | score |", f"|{'---|' * (len(SHOWN) + 4)}"]
    for name, runs in record.items():
        _, metric, score = RUNS[name]
        found = [f"{mean:.3f} ± {spread:.3f}" for mean, spread in bands(runs)]
        cells = [f"`{name}`", f"`{metric}`", *(found[part] for part in SHOWN)]
        lines.append(f"| {' | '.join([*cells, f'`{score}`', found[-1]])} |")
    return "\n".join(lines) + "\n"


def plot(record: dict[str, list[list[float]]], file: Path) -> None:
    """Plot the runs of each config, their mean and their spread over the share of the steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    shares = [(part + 0.5) / PARTS for part in range(PARTS)]
    for axes, (name, runs) in zip(figure.subplots(1, len(record)), record.items(), strict=True):
        found = bands(runs)[:PARTS]
        low = [mean - spread for mean, spread in found]
        high = [mean + spread for mean, spread in found]
        axes.fill_between(shares, low, high, color="#0f766e", alpha=0.2, linewidth=0)
        for run in runs:
            axes.plot(shares, run[:PARTS], color="#0f766e", linewidth=0.6, alpha=0.5)
        axes.plot(shares, [mean for mean, _ in found], color="#0f766e", linewidth=2)
        axes.set(title=name, xlabel="share of the steps", ylabel=RUNS[name][1])
        axes.grid(alpha=0.3)
    figure.savefig(file, dpi=100)


def write(record: dict[str, list[list[float]]]) -> None:
    """Write the figures, the picture and the table."""
    rows = (f"{json.dumps(name)}: [\n{_lines(runs)}\n]" for name, runs in record.items())
    RECORD.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    plot(record, DOCS / "reference.png")
    page = DOCS / "reference.md"
    page.write_text(PLACE.sub(lambda _: table(record), page.read_text()))


def _lines(runs: list[list[float]]) -> str:
    return ",\n".join(map(json.dumps, runs))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=RUNS, help="these configs alone"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="seeds of the runs")
    parser.add_argument("--write", action="store_true", help="record five seeds")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    arguments = parser.parse_args()
    seeds = SEEDS if arguments.write else arguments.seeds
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    result: dict[str, Any] = {"agrees": True, "runs": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.only or RUNS:
            runs = result["runs"][name] = []
            for seed in seeds:
                runs.append(measure(name, seed, Path(folder)))
                print(f"{name} with seed {seed}: {RUNS[name][2]} {runs[-1][-1]:.4f}", flush=True)
                if not arguments.write and (found := differences(runs[-1], recorded[name])):
                    result["agrees"] = False
                    print(*found, sep="\n")
    if arguments.write:
        write(recorded | result["runs"])
    if arguments.json:
        print(json.dumps(result))
    if not result["agrees"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
