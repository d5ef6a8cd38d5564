"""Lockstep against pipelines that overlap, on the same work in one run.

Usage: python scripts/bench/overlap.py [--rounds N] [--steps N] [--json]

The real program on real engines: a trainer rank and a generator rank, a core each, sized so that generating a batch
takes about as long as training on it. Each round runs every mode for some steps, one after another on the same
processes. The time of a stage is what it takes in lockstep, where nothing runs beside it; the time of a step is the
mean over steps with work on both sides: the pipeline fills in the first ones, and runs dry in the last. Ratios are of
one round, and the figures medians over the rounds. "cores" is what plain computing in two processes at once takes
over one alone: above 1 where others use the machine, too.
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
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

from torchtitan.components.optimizer import default_adamw

from rl.actors.generator import GeneratorMesh
from rl.actors.group import Supervisor
from rl.actors.reward import RewardWorkers
from rl.actors.trainer import TrainerMesh
from rl.cli import find_config
from rl.config import RunConfig
from rl.controller.loop import Controller
from rl.launch.local import start_runtime, stop_runtime
from rl.model.shape import ModelConfig
from rl.observe.progress import Progress
from rl.observe.record import RunRecord


@dataclass(frozen=True, slots=True)
class Mode:
    """How generating and training take turns."""

    pipeline: str
    bound: int
    parts: int = 1

    def __str__(self) -> str:
        return f"{self.pipeline} {self.bound}" if self.bound else "lockstep"


LOCKSTEP = Mode("deterministic", 0)
OVERLAPPED = (Mode("deterministic", 1), Mode("deterministic", 2), Mode("asynchronous", 2, parts=4))
FILLING, DRYING = 5, 3  # steps at both ends that are not measured
SPIN = 20_000_000


def configured(tiny: bool) -> RunConfig:
    """Random weights that stay so: the vocabulary is so large that completions are as long as they may be."""
    config = find_config("quickstart")()
    config.model = ModelConfig(
        vocab_size=1024, dim=256, n_layers=4, n_heads=4, n_kv_heads=4, head_dim=64, hidden_dim=768, max_seq_len=128
    )
    config.rollout.prompts_per_step, config.rollout.samples_per_prompt, config.rollout.max_tokens = 8, 8, 64
    if tiny:
        config.model.dim, config.model.n_layers, config.model.hidden_dim = 64, 1, 128
        config.rollout.samples_per_prompt, config.rollout.max_tokens = 2, 4
    config.trainer.optimizer, config.trainer.micro_batch_size = default_adamw(lr=1e-9), 16
    config.trainer.checkpoint.enable, config.evaluation.prompts = False, 0
    return config


class Runs:
    """Processes on which one controller after another goes on with the same run."""

    def __init__(self, config: RunConfig, folder: Path):
        self.config, self.record, self.done = config, RunRecord(folder), 0
        supervisor = Supervisor()
        common: dict[str, Any] = {"folder": folder, "seed": 0, "deadlines": config.deadlines}
        self.trainer = TrainerMesh(config.trainer, config.model, supervisor, steps=1_000_000, **common)
        self.generator = GeneratorMesh(config.generator, config.model, supervisor, name="generator-0", **common)
        self.rewards = RewardWorkers(config.data, config.model, supervisor, count=1, **common)
        self.task = config.data.build(seed=0, model=config.model)

    async def go_on(self, mode: Mode, steps: int) -> tuple[list[dict], list[dict]]:
        """Rows of metrics.jsonl and ledger.jsonl for ``steps`` more steps in a mode."""
        config, rollout, first = self.config, self.config.rollout, self.done
        rollout.pipeline, rollout.max_staleness, rollout.parts_per_step = mode.pipeline, mode.bound, mode.parts  # type: ignore[assignment]
        config.steps = self.done = first + steps
        meshes = self.trainer, lambda number: self.generator, self.rewards
        await Controller(config, self.task, *meshes, self.record, Progress(config.steps, quiet=True)).run()
        ledger = [json.loads(line) for line in self.record.ledger_path.read_text().splitlines()]
        return self.record.read_metrics()[first:], ledger[first:]

    async def stop(self) -> None:
        await asyncio.gather(self.trainer.stop(), self.generator.stop(), self.rewards.stop())


async def measure(config: RunConfig, *, rounds: int, steps: int, folder: Path) -> dict[str, Any]:
    """All modes in each round; the first round of lockstep is not counted."""
    runs, results = Runs(config, folder), []
    histograms: dict[Mode, Counter[int]] = {mode: Counter() for mode in OVERLAPPED}
    try:
        await runs.go_on(LOCKSTEP, 2)
        for number in range(rounds):
            cores = await asyncio.to_thread(contention)
            rows, _ = await runs.go_on(LOCKSTEP, steps)
            stages = [statistics.median(row[f"timing/{name}"] for row in rows[1:]) for name in ("generate", "train")]
            result = {"cores": cores, "generate_s": stages[0], "train_s": stages[1]}
            result |= {f"{LOCKSTEP}": statistics.median(row["timing/step"] for row in rows[1:]) / max(stages)}
            for mode in OVERLAPPED:
                rows, ledger = await runs.go_on(mode, FILLING + steps + DRYING)
                result[f"{mode}"] = statistics.mean(row["timing/step"] for row in rows[FILLING:-DRYING]) / max(stages)
                for row in ledger:
                    histograms[mode].update({int(age): count for age, count in row["staleness"].items()})
            results.append(result)
            print(
                f"round {number + 1}: " + ", ".join(f"{name} {value:.2f}" for name, value in result.items()), flush=True
            )
    finally:
        await runs.stop()
    medians = {name: statistics.median(result[name] for result in results) for name in results[0]}
    return medians | {"staleness": {f"{mode}": dict(sorted(ages.items())) for mode, ages in histograms.items()}}


def contention() -> float:
    """What two processes that compute take over one alone."""
    alone, both = (_spin_together(count) for count in (1, 2))
    return both / alone


def _spin_together(count: int) -> float:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_spin) for _ in range(count)]
    begun = time.perf_counter()
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return time.perf_counter() - begun


def _spin() -> None:
    for _ in range(SPIN):
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="measured in each mode and round")
    parser.add_argument("--tiny", action="store_true", help="a model of a few parameters, to try the program")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        start_runtime(Path(folder) / "controller.log")
        run = partial(measure, rounds=options.rounds, steps=options.steps, folder=Path(folder))
        result = asyncio.run(run(configured(options.tiny)))
        stop_runtime()
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
