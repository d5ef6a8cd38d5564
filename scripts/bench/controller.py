"""Cost of the RL loop: a run whose generator, rewards and trainer take no time.

Usage: python scripts/bench/controller.py [--repeats N] [--pipelines NAME ...] [--bounds N ...]
[--json]

The real loop, scheduler, session, ledger, push and run folder run on meshes that answer at once: 32
prompts a step, 8 completions each of 32 tokens. Every pipeline runs with a staleness bound of 0 and
of 2. Each repeat has runs of a thousand rollouts before and after one of a hundred thousand, so
that other load on the machine affects both. Costs are CPU time from the first request to the end of
the last step; ratios are medians over the repeats. "memory" is resident memory after the long run
over that after a tenth of it.

"cost_growth_generators" is the cost of a rollout with a thousand generators over that with four.
Both runs have the same steps, of a thousand prompts with 8 completions each. A step includes a push
from 64 trainer ranks to every generator.

"checkpoint_pause_s" is the longest pause of the event loop in all repeats while a checkpoint is
written, with 1,024 rollouts of 3,072 tokens in the ledger and 64 ranks that get a message.

"order_s" and "order_bytes_per_prompt" are the time and the memory of the order of an epoch of a
million prompts. The event loop computes it once per epoch.
"""

import argparse
import asyncio
import gc
import json
import os
import random
import statistics
import sys
import tempfile
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

from instant_meshes import TOKENS, Generator, Marks, Rewards, Trainer

from rl.cli.arguments import find_config
from rl.config import RLConfig
from rl.data.order import epoch_order
from rl.observe.progress import Progress
from rl.observe.record import RunRecord
from rl.session.session import Session
from rl.trainers.rl import RLTrainer
from rl.trainers.run_folder import RunFolder
from rl.types import Completion, Prompt, Rollout

PIPELINES = ("deterministic", "asynchronous")
BOUNDS = (0, 2)
# rollouts
SHORT = 1_000
LONG = 100_000
SHORT_RUNS = 8  # on each side of a long one
# rollouts in a checkpoint, tokens of each
SAVED = 1_024
SAVED_TOKENS = 3_072
VOCABULARY = 150_000
PROMPTS = 1_000_000
# generators, and prompts and steps of runs with either number of them
FEW = 4
MANY = 1_000
CROWD_PROMPTS = 1_000
CROWD_STEPS = 6


def configured(pipeline: str, bound: int, rollouts: int) -> RLConfig:
    """Return the config of a run of about ``rollouts`` rollouts, in whole steps."""
    config = find_config("quickstart")()
    config.rollout.pipeline = pipeline
    config.rollout.max_staleness = bound
    config.rollout.max_tokens = TOKENS
    config.model.max_seq_len = 64
    config.steps = -(
        -rollouts // (config.rollout.prompts_per_step * config.rollout.samples_per_prompt)
    )
    config.trainer.checkpoint.enable = False
    config.evaluation.prompts = 0
    config.weights.transport = "shared_memory"
    return config


def crowded(pipeline: str, generators: int) -> RLConfig:
    """Return the config of a run with large steps and ``generators`` generators."""
    config = configured(pipeline, 2, SHORT)
    config.generator.replicas = generators
    config.hardware.host_memory_gib = 1e6
    config.rollout.prompts_per_step = CROWD_PROMPTS
    config.steps = CROWD_STEPS
    return config


def loop_in(folder: str, config: RLConfig, marks: Marks) -> RLTrainer:
    """Return the trainer's loop with meshes that answer at once."""
    trainer: Any = Trainer(marks)
    meshes = SimpleNamespace(
        models=lambda: {"trainer": trainer},
        generator=partial(Generator, marks),
        rewards=lambda task, events: Rewards(),
    )
    run = RunFolder(config, RunRecord(folder), Progress(config.steps, quiet=True))
    make_session = partial(Session.on_nodes, meshes=meshes)
    return RLTrainer(config, folder=run, make_session=make_session)


async def train(loop: RLTrainer) -> None:
    await loop.train()


def run(config: RLConfig) -> tuple[Marks, float]:
    """Run the controller to its end. Return its marks and the largest staleness of a token."""
    with tempfile.TemporaryDirectory() as folder:
        marks = Marks()
        loop = loop_in(folder, config, marks)
        asyncio.run(train(loop))
        record = loop.run.record
        if loop.ledger.trained != config.steps * config.rollout.prompts_per_step:
            raise RuntimeError("the run did not train on all prompts: nothing was measured")
        return marks, max(row["rollout/staleness_max"] for row in record.read_metrics())


def costs(config: RLConfig, marks: Marks) -> tuple[float, float]:
    """Return CPU and wall time of one rollout, in s."""
    assert marks.began is not None
    count = config.steps * config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    cpu, wall = ((end - begin) / count for begin, end in zip(marks.began, marks.ended, strict=True))
    return cpu, wall


def measure(pipeline: str, bound: int, *, repeats: int, long: int) -> dict[str, Any]:
    """Measure one pipeline in alternating runs of both lengths."""
    short_config = configured(pipeline, bound, SHORT)
    long_config = configured(pipeline, bound, long)
    growths = []
    times = []
    memory = []
    staleness = []
    for _ in range(repeats):
        short = [costs(short_config, run(short_config)[0])[0] for _ in range(SHORT_RUNS)]
        marks, oldest = run(long_config)
        short += [costs(short_config, run(short_config)[0])[0] for _ in range(SHORT_RUNS)]
        cpu, wall = costs(long_config, marks)
        growths.append(cpu / statistics.median(short))
        times.append((1e6 * statistics.median(short), 1e6 * cpu, wall))
        memory.append(marks.resident[-1] / marks.resident[len(marks.resident) // 10])
        staleness.append(oldest)
    return {
        "pipeline": pipeline,
        "max_staleness": bound,
        "staleness": max(staleness),
        "rollouts_per_s": 1 / statistics.median(wall for _, _, wall in times),
        "cpu_us_per_rollout_short": statistics.median(cpu for cpu, _, _ in times),
        "cpu_us_per_rollout": statistics.median(cpu for _, cpu, _ in times),
        "cost_growth": statistics.median(growths),
        "memory_growth": statistics.median(memory),
    }


def measure_generators(pipeline: str, *, repeats: int, many: int) -> dict[str, Any]:
    """Measure a rollout with few and with ``many`` generators, by turns."""
    few_config = crowded(pipeline, FEW)
    many_config = crowded(pipeline, many)
    few = []
    more = []
    for _ in range(repeats):
        few.append(costs(few_config, run(few_config)[0])[0])
        more.append(costs(many_config, run(many_config)[0])[0])
    return {
        "pipeline": pipeline,
        "generators": many,
        "cpu_us_per_rollout_few": 1e6 * statistics.median(few),
        "cpu_us_per_rollout": 1e6 * statistics.median(more),
        "cost_growth": statistics.median(b / a for a, b in zip(few, more, strict=True)),
    }


def fill(loop: RLTrainer, tokens: int) -> None:
    """Put ``SAVED`` finished rollouts of ``tokens`` random tokens into the ledger. No two rollouts
    share a list, like rollouts from messages.
    """
    draw = random.Random(0)
    ledger = loop.ledger
    samples = SAVED // (2 * loop.arguments.rollout.prompts_per_step)
    while ledger.admits(0):
        prompt_id = ledger.admit(0)
        prompt = Prompt(
            prompt_id=prompt_id, tokens=[*range(1000, 1256)], text="prompt " * 64, answer="1"
        )
        group = [
            Rollout.single_turn(
                prompt,
                Completion(
                    tokens=draw.choices(range(VOCABULARY), k=tokens),
                    logprobs=[-draw.random() for _ in range(tokens)],
                    versions=[0] * tokens,
                    finish_reason="length",
                ),
                sample=sample,
                text="abc " * tokens,
                reward=float(sample),
                metrics={"correct": 0.0},
            )
            for sample in range(samples)
        ]
        ledger.finish(prompt_id, group)
    if sum(map(len, ledger.finished().values())) != SAVED:
        raise RuntimeError("the ledger does not hold the rollouts to measure")


def prompt_order(size: int) -> dict[str, float]:
    """Measure the order of an epoch of ``size`` prompts, which the event loop computes once."""
    began = time.perf_counter()
    order = epoch_order(0, 0, size)
    seconds = time.perf_counter() - began
    epoch_order.cache_clear()
    return {"order_s": seconds, "order_bytes_per_prompt": sys.getsizeof(order) / size}


def checkpoint(*, repeats: int, tokens: int) -> dict[str, float]:
    """Measure the cost of a checkpoint to the event loop and to the run."""
    config = configured("asynchronous", 1, SAVED)
    pauses = []
    times = []

    async def tick() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            pauses.append(now - last)
            last = now

    async def save(loop: RLTrainer) -> None:
        await loop.run.open()
        fill(loop, tokens)
        ticking = asyncio.create_task(tick())
        await asyncio.sleep(0.01)
        pauses.clear()
        for _ in range(repeats):
            loop.step += 1
            began = time.perf_counter()
            await loop.run.save_checkpoint()
            times.append(time.perf_counter() - began)
            await asyncio.sleep(0.01)
        ticking.cancel()

    with tempfile.TemporaryDirectory() as folder:
        loop = loop_in(folder, config, Marks())
        asyncio.run(save(loop))
        size = sum(path.stat().st_size for path in loop.run.checkpoints.path(1).iterdir())
    policy: Any = loop.session.trainer
    return {
        "checkpoint_pause_s": max(pauses),
        "checkpoint_s": statistics.median(times),
        "checkpoint_bytes": size,
        "checkpoint_message_bytes": policy.message_bytes,
    }


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['pipeline']:13} staleness {row['staleness']:.0f} of {row['max_staleness']}: "
        f"{row['rollouts_per_s']:7,.0f} rollouts/s, {row['cpu_us_per_rollout']:5.1f} us of CPU "
        f"each, {row['cost_growth']:.2f} x a short run's, memory x {row['memory_growth']:.3f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pipelines", nargs="+", choices=PIPELINES, default=list(PIPELINES))
    parser.add_argument(
        "--bounds", nargs="+", type=int, default=list(BOUNDS), help="values of max_staleness"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="two thousand rollouts, to try the program"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    options = parser.parse_args()
    cases = [(pipeline, bound) for pipeline in options.pipelines for bound in options.bounds]
    rows = []
    run(configured("deterministic", 0, SHORT))  # warm-up: imports and first allocations
    gc.freeze()  # as rl.train does
    for case in cases:
        rows.append(
            measure(*case, repeats=options.repeats, long=2 * SHORT if options.tiny else LONG)
        )
        show(rows[-1])
    crowds = []
    for pipeline in options.pipelines:
        many = 2 * FEW if options.tiny else MANY
        crowd = measure_generators(pipeline, repeats=options.repeats, many=many)
        print(
            f"{pipeline:13} {many} generators: {crowd['cpu_us_per_rollout']:5.1f} us of CPU each, "
            f"{crowd['cost_growth']:.2f} x that with {FEW}",
            flush=True,
        )
        crowds.append(crowd)
    saving = checkpoint(repeats=options.repeats, tokens=32 if options.tiny else SAVED_TOKENS)
    print(
        f"checkpoint: the event loop stands still for {saving['checkpoint_pause_s']:.3f} s at most "
        f"of {saving['checkpoint_s']:.2f} s; {saving['checkpoint_bytes'] / 1e6:.1f} MB written "
        f"once, {saving['checkpoint_message_bytes'] / 1e3:.1f} kB sent to a rank"
    )
    order = prompt_order(2 * SHORT if options.tiny else PROMPTS)
    print(
        f"order of an epoch: {order['order_s']:.2f} s, {order['order_bytes_per_prompt']:.1f} bytes "
        "a prompt"
    )
    gc.unfreeze()
    result = {
        "rollouts_per_s": min(row["rollouts_per_s"] for row in rows),
        "cost_growth": max(row["cost_growth"] for row in rows),
        "cost_growth_generators": max(row["cost_growth"] for row in crowds),
        "memory_growth": max(row["memory_growth"] for row in rows),
        **saving,
        **order,
        "pipelines": rows,
        "generators": crowds,
    }
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
