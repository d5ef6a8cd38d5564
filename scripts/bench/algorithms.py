"""Algorithms on copy_digits: which of them train a random Qwen3 of 100 thousand parameters to a
reward above 0.9, and in how many steps.

Usage: python scripts/bench/algorithms.py [--off-policy | --only NAME ...] [--seeds N] [--steps N]
[--plot F] [--json]

Each is the quickstart with another algorithm (algorithm_configs.py) and is trained once per seed,
in at most --steps steps (200) of 32 prompts x 8 completions. "solved": the exact match on 256
held-out prompts, greedy, is above 0.9 with every seed. "steps": the first step at which the mean
reward of ten steps is above 0.9, for the worst seed. With --off-policy, rollouts are four steps
stale (max_staleness 4, deterministic), and each correction is tried.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from programs import output_of, rows_of

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TIMEOUT_S = 1800.0
GOAL = 0.9
WINDOW = 10
ON_POLICY = ("ppo", "grpo_kl", "rloo", "gspo", "cispo", "dapo_loss", "reinforce_plus_plus", "dppo")
OFF_POLICY = (
    *("stale", "stale_recomputed", "stale_truncated"),
    *("stale_masked_tokens", "stale_masked_sequences", "stale_decayed"),
)
VARIABLES = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, HERE))), "OMP_NUM_THREADS": "1"}


def train(
    config: str, seed: int, folder: Path, options: list[str]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Train in a process of its own; return the metrics of each step and the summary."""
    command = [sys.executable, "-m", "rl.train", "--config", config, "--seed", str(seed)]
    command += ["--output-dir", str(folder), "--quiet", *options]
    output_of(command, TIMEOUT_S, **VARIABLES)
    rows = rows_of(folder / "metrics.jsonl")
    return rows, json.loads((folder / "summary.json").read_text())


def steps_to_goal(rewards: list[float]) -> int | None:
    """Return the first step at which the mean of WINDOW rewards was above GOAL."""
    means = (
        statistics.mean(rewards[end - WINDOW : end]) for end in range(WINDOW, len(rewards) + 1)
    )
    return next((number + WINDOW for number, mean in enumerate(means) if mean > GOAL), None)


def compare(names: list[str], seeds: int, options: list[str], folder: Path) -> dict[str, Any]:
    """Run all algorithms with all seeds, one run after another."""
    found: dict[str, Any] = {}
    for name in names:
        runs = []
        for seed in range(seeds):
            config = f"algorithm_configs.{name}"
            rows, summary = train(config, seed, folder / f"{name}-{seed}", options)
            runs.append(([row["reward/mean"] for row in rows], summary["eval/exact_match"]))
            print(f"{name:22} seed {seed}: exact match {runs[-1][1]:.3f}", flush=True)
        reached = [steps_to_goal(rewards) for rewards, _ in runs]
        found[name] = {
            "exact_match": [exact for _, exact in runs],
            "steps": None if None in reached else max(step for step in reached if step is not None),
            "rewards": [rewards for rewards, _ in runs],
        }
    solved = [name for name, each in found.items() if min(each["exact_match"]) > GOAL]
    return {"solved": solved, "seeds": seeds, "algorithms": found}


def plot(result: dict[str, Any], file: Path) -> None:
    """Plot the mean rewards over the steps: for each algorithm the mean of its seeds, smoothed over
    WINDOW steps.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for name, each in result["algorithms"].items():
        means = [statistics.mean(step) for step in zip(*each["rewards"], strict=True)]
        smooth = [
            statistics.mean(means[max(0, end - WINDOW) : end]) for end in range(1, len(means) + 1)
        ]
        axes.plot(range(1, len(smooth) + 1), smooth, label=name.replace("_", " "))
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--off-policy", action="store_true", help="four steps stale, with each of the corrections"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=[*ON_POLICY, *OFF_POLICY], help="these alone"
    )
    parser.add_argument("--seeds", type=int, default=2, help="runs of each")
    parser.add_argument("--steps", type=int, default=200, help="of each run")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the rewards into this file")
    parser.add_argument(
        "--tiny", action="store_true", help="tiny batches, only to see that everything runs"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    arguments = parser.parse_args()
    names = arguments.only or (OFF_POLICY if arguments.off_policy else ON_POLICY)
    options = ["--steps", str(arguments.steps), "--trainer.checkpoint.no-enable"]
    if arguments.tiny:
        sizes = "--rollout.prompts_per_step 16 --rollout.samples_per_prompt 2"
        options += [*sizes.split(), "--evaluation.prompts", "8"]
    with tempfile.TemporaryDirectory() as folder:
        result = compare(list(names), arguments.seeds, options, Path(folder))
    print(f"{'algorithm':22} {'exact match':>12} {'steps to ' + str(GOAL):>14}")
    for name, each in result["algorithms"].items():
        print(f"{name:22} {min(each['exact_match']):12.3f} {each['steps'] or '-':>14}")
    if arguments.plot:
        plot(result, arguments.plot)
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
