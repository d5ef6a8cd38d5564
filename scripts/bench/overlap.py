"""Lockstep against pipelines that overlap, on the same work in one run.

Usage: python scripts/bench/overlap.py [--rounds N] [--steps N] [--json]

The real controller runs real engines: a trainer rank and a generator rank, one core each. The size
of the model is such that generating a batch takes about as long as training on it. Each round runs
every mode for some steps, one after another on the same processes. Stages are timed in lockstep,
where no other stage runs. Steps are timed without the first and last steps of a mode, in which a
pipeline fills and drains. Ratios are taken within a round; figures are medians over the rounds.
The figure of the asynchronous pipeline is that of whole batches, the default. Chunks are for runs
whose generators take longer than the trainer.

"two over one" is the time of computing in two processes at once over the time in one process. It is
above 1 if the machine has other work. A step can then take no less than this ratio times its longer
stage.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

os.environ["OMP_NUM_THREADS"] = "1"

from same_processes import Processes
from torchtitan.components.optimizer import default_adamw

from rl.actors.processes import ensure_runtime, stop_runtime
from rl.cli.arguments import find_config
from rl.config import RLConfig
from rl.model.shape import ModelConfig


@dataclass(frozen=True, slots=True)
class Mode:
    """Options that decide which stages may overlap."""

    name: str
    pipeline: Literal["deterministic", "asynchronous"] = "deterministic"
    max_staleness: int = 0
    chunks: int = 1

    def apply(self, config: RLConfig) -> None:
        """Set the options in ``config``."""
        config.rollout.pipeline = self.pipeline
        config.rollout.max_staleness = self.max_staleness
        config.rollout.stream_chunks = self.chunks


MODES = (
    Mode("lockstep"),
    Mode("deterministic 1", "deterministic", 1),
    Mode("deterministic 2", "deterministic", 2),
    Mode("asynchronous 2", "asynchronous", 2),
    Mode("asynchronous 2, in 4 chunks", "asynchronous", 2, chunks=4),
)
# steps at both ends that are not measured
FILLING = 5
DRYING = 3
SPINS = 20_000_000

Times = dict[str, float]
"""Seconds of a step, and of its stages "generate" and "train"."""


def configured(tiny: bool) -> RLConfig:
    """Return the config. The weights stay random. Since the vocabulary is large, stop tokens are
    rare, and nearly all completions have the same length.
    """
    config = find_config("quickstart")()
    config.model = ModelConfig(
        vocab_size=1024,
        dim=256,
        n_layers=4,
        n_heads=4,
        n_kv_heads=4,
        head_dim=64,
        hidden_dim=512,
        max_seq_len=128,
    )
    config.rollout.prompts_per_step = 8
    config.rollout.max_tokens = 64
    if tiny:
        config.model.n_layers = 1
        config.rollout.samples_per_prompt = 2
        config.rollout.max_tokens = 4
        config.rollout.reward_workers = 0
    config.trainer.optimizer = default_adamw(lr=1e-9)
    config.trainer.micro_batch_size = 16
    config.trainer.checkpoint.enable = False
    config.evaluation.prompts = 0
    return config


async def measure(config: RLConfig, *, rounds: int, steps: int, folder: Path) -> dict[str, Any]:
    """Measure every mode in every round, after a first step."""
    each = FILLING + steps + DRYING
    config.steps = 1 + rounds * len(MODES) * each
    processes = Processes(config, folder)
    cores = []
    times: dict[str, list[Times]] = {mode.name: [] for mode in MODES}
    staleness: dict[str, Counter[str]] = {mode.name: Counter() for mode in MODES}
    try:
        await processes.run(MODES[0].apply, 1)
        for number in range(rounds):
            cores.append(await asyncio.to_thread(two_over_one))
            for mode in MODES:
                metrics, ledger = await processes.run(mode.apply, each)
                times[mode.name].append(mean_times(metrics[FILLING:-DRYING]))
                for row in ledger:
                    staleness[mode.name].update(row["staleness"])
            taken = ", ".join(f"{mode.name} {times[mode.name][-1]['step']:.2f}" for mode in MODES)
            print(
                f"round {number + 1} of {rounds}, seconds a step: {taken}; two over one "
                f"{cores[-1]:.2f}",
                flush=True,
            )
    finally:
        await processes.stop()
    return summary(times, staleness) | {"two_over_one": statistics.median(cores)}


def mean_times(rows: list[dict[str, float]]) -> Times:
    return {
        name: statistics.mean(row[f"timing/{name}"] for row in rows)
        for name in ("step", "generate", "train")
    }


def summary(times: dict[str, list[Times]], staleness: dict[str, Counter[str]]) -> dict[str, Any]:
    """Return the medians over the rounds."""
    alone = times["lockstep"]
    modes = {
        mode.name: {
            **medians(times[mode.name]),
            "step_over_max_stage": statistics.median(
                each["step"] / max(stages["generate"], stages["train"])
                for each, stages in zip(times[mode.name], alone, strict=True)
            ),
            "max_staleness": mode.max_staleness,
            "staleness": dict(sorted(staleness[mode.name].items())),
        }
        for mode in MODES
    }
    return {"step_over_max_stage": modes["asynchronous 2"]["step_over_max_stage"], "modes": modes}


def medians(times: list[Times]) -> dict[str, float]:
    return {f"{name}_s": statistics.median(each[name] for each in times) for name in times[0]}


def two_over_one() -> float:
    """Return the time of two parallel processes over that of one."""
    one, two = (compute_together(count) for count in (1, 2))
    return two / one


def compute_together(count: int) -> float:
    processes = [multiprocessing.get_context("fork").Process(target=compute) for _ in range(count)]
    begun = time.perf_counter()
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return time.perf_counter() - begun


def compute() -> None:
    for _ in range(SPINS):
        pass


def show(result: dict[str, Any]) -> None:
    print(f"two processes over one: {result['two_over_one']:.2f}")
    print(
        "mode                         step  generate  train  step / longer stage alone  tokens by "
        "staleness (bound)"
    )
    for name, row in result["modes"].items():
        ages = ", ".join(f"{age}: {count:,}" for age, count in row["staleness"].items())
        print(
            f"{name:27} {row['step_s']:5.2f}  {row['generate_s']:8.2f}  {row['train_s']:5.2f}  "
            f"{row['step_over_max_stage']:25.2f}  {ages} ({row['max_staleness']})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="measured in each mode and round")
    parser.add_argument(
        "--tiny", action="store_true", help="a model of a few parameters, to try the program"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ensure_runtime(folder / "controller.log")
        config = configured(options.tiny)
        result = asyncio.run(
            measure(config, rounds=options.rounds, steps=options.steps, folder=folder)
        )
        stop_runtime()
    show(result)
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
