"""A step of the quickstart that records everything, against one that records metrics alone.

Usage: python scripts/bench/recording.py [--rounds N] [--steps N] [--json]

"everything" writes all rollouts with the values of their tokens, and computes and writes digests of
gradient and weights. Each round runs both for some steps, one after another on the same processes,
and the order changes with every round. Steps are timed without the first ones of a part. The ratio
is taken within a round; figures are medians over the rounds.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

from same_processes import Processes

from rl.actors.processes import ensure_runtime, stop_runtime
from rl.cli.arguments import find_config
from rl.config import RLConfig

FILLING = 3  # first steps of a part, which are not measured


def record_nothing(config: RLConfig) -> None:
    config.record.rollouts = "none"
    config.record.digests = False


def record_everything(config: RLConfig) -> None:
    config.record.rollouts = "all"
    config.record.digests = True


MODES = {"metrics": record_nothing, "everything": record_everything}


async def measure(*, rounds: int, steps: int, folder: Path) -> dict[str, Any]:
    """Measure both in every round, after a first step."""
    each = FILLING + steps
    config = find_config("quickstart")()
    config.steps = 1 + rounds * len(MODES) * each
    config.trainer.checkpoint.enable = False
    config.evaluation.prompts = 0
    processes = Processes(config, folder)
    times: dict[str, list[float]] = {name: [] for name in MODES}
    try:
        await processes.run(record_nothing, 1)
        for number in range(rounds):
            for name in [*MODES][:: -1 if number % 2 else 1]:
                metrics, _ = await processes.run(MODES[name], each)
                seconds = [row["timing/step"] for row in metrics[FILLING:]]
                times[name].append(statistics.median(seconds))
            taken = ", ".join(f"{name} {times[name][-1]:.4f}" for name in MODES)
            print(f"round {number + 1} of {rounds}, seconds a step: {taken}", flush=True)
    finally:
        await processes.stop()
    pairs = zip(times["everything"], times["metrics"], strict=True)
    ratios = [everything / metrics for everything, metrics in pairs]
    recorded = rounds * each
    sizes = {
        "rollouts": sum(path.stat().st_size for path in (folder / "rollouts").iterdir()),
        "digests": (folder / "digests.jsonl").stat().st_size,
    }
    return {
        "recorded_over_bare": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "step_s": {name: statistics.median(each) for name, each in times.items()},
        "kib_per_step": {name: size / recorded / 1024 for name, size in sizes.items()},
        "events_kib_per_step": (folder / "events.jsonl").stat().st_size / config.steps / 1024,
    }


def show(result: dict[str, Any]) -> None:
    print(
        f"recording everything / metrics alone: {result['recorded_over_bare']:.3f} "
        f"({result['lowest']:.3f} to {result['highest']:.3f})"
    )
    sizes = ", ".join(f"{name} {size:.1f}" for name, size in result["kib_per_step"].items())
    print(f"KiB a step: {sizes}, events {result['events_kib_per_step']:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=20, help="measured in each part and round")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ensure_runtime(folder / "controller.log")
        result = asyncio.run(measure(rounds=options.rounds, steps=options.steps, folder=folder))
        stop_runtime()
    show(result)
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
