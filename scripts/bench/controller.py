"""What the RL loop itself costs: a run whose generator, rewards and trainer take no time.

Usage: python scripts/bench/controller.py [--repeats N] [--pipelines NAME ...] [--bounds N ...]
[--json]

The real loop, scheduler, session, ledger, push and run folder are driven by meshes that answer
at once: 32 prompts a step, 8 completions each of 32 tokens. Every pipeline is run with a staleness
bound of 0 and of 2. In each repeat runs of a thousand rollouts stand before and after one of a
hundred thousand, so that what else the machine does falls on both. Costs are CPU time from the
first request to the end of the last step; ratios are medians over the repeats. "memory" is resident
memory after the whole long run over that after a tenth of it.

"checkpoint_pause_s" is how long the event loop stands still at most while a checkpoint is written,
with 1,024 rollouts of 3,072 tokens in the ledger and eight ranks that are sent their message: the
longest of all repeats.
"""

import argparse
import asyncio
import gc
import json
import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch

from rl.cli import find_config
from rl.config import RLConfig
from rl.errors import ActorFailure
from rl.metrics import Metrics, Value
from rl.model.shards import Box, Region
from rl.observe.progress import Progress
from rl.observe.record import RunRecord
from rl.roles import session_config
from rl.session.session import Session
from rl.trainers.loop import RLTrainer
from rl.types import Batch, Completion, GenerationRequest, Prompt, Rollout
from rl.weights.transport import Sent

LAYOUT = (Region("w", (1,), Box.whole((1,))),)
TOKENS = 32
PIPELINES = ("deterministic", "asynchronous")
BOUNDS = (0, 2)
# rollouts
SHORT = 1_000
LONG = 100_000
SHORT_RUNS = 8  # on each side of a long one
# rollouts in a checkpoint, tokens of each, ranks of the trainer
SAVED = 1_024
SAVED_TOKENS = 3_072
RANKS = 8


@dataclass(slots=True)
class Marks:
    """What the meshes note of a run."""

    began: tuple[float, float] | None = None
    """CPU and wall time, in s, when the first rollout was asked for."""
    ended: tuple[float, float] = (0.0, 0.0)
    """When the last step was done."""
    resident: list[int] = field(default_factory=list)
    """Bytes of resident memory at each step."""


class Mesh:
    """Starts at once and is never lost."""

    name = "mesh"
    is_running = True

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass

    async def failed(self) -> ActorFailure:
        return await asyncio.Future()

    async def call(self, name: str, *args: Any) -> Any:
        return await getattr(self, name)(*args)


class Trainer(Mesh):
    """Its weights are its version."""

    loaded = None

    def __init__(self, marks: Marks):
        self.marks = marks
        self.version = 0

    async def layouts(self) -> list[Any]:
        return [("here", LAYOUT)]

    async def open_publishers(self, transfer: Any) -> list[Any]:
        return ["address"]

    async def push_weights(self) -> tuple[int, Sent]:
        await asyncio.sleep(0)
        return self.version, Sent(0, 0)

    async def forward(self, batch: Batch, *, temperature: float) -> dict[str, torch.Tensor]:
        await asyncio.sleep(0)
        return {"logprobs": torch.full(batch.tokens.shape, -1.0)}

    async def forward_backward(
        self, batch: Batch, loss: Any, *, temperature: float
    ) -> tuple[dict, Metrics]:
        await asyncio.sleep(0)
        return {}, Metrics({})

    async def optim_step(self, **_: Any) -> Metrics:
        await asyncio.sleep(0)
        self.version += 1
        self.marks.resident.append(_resident())
        return Metrics(
            {
                "loss/mean": Value(0.0),
                "trainer/grad_norm": Value(1.0),
                "trainer/updates": Value(1.0, "sum"),
            }
        )

    async def load_checkpoint(self, step: int) -> tuple[dict, list[str]]:
        return {}, []

    async def save_checkpoint(self, step: int, state: dict) -> None:
        """Take the time to make a message of each rank's."""
        self.message_bytes = sum(len(pickle.dumps((step, state))) for _ in range(RANKS)) // RANKS

    async def weight_digests(self, dtype: torch.dtype | None = None) -> list[dict]:
        return [{("w", Box.whole((1,))): self.version}]

    async def export_hf(self, folder: str) -> None:
        self.marks.ended = time.process_time(), time.perf_counter()
        Path(folder).mkdir()
        Path(folder, "config.json").write_text("{}")


class Generator(Mesh):
    """Says the same tokens to everyone."""

    dtype = torch.float32

    def __init__(self, marks: Marks):
        self.marks = marks
        self.version = 0

    async def layouts(self) -> list[Any]:
        return [("here", LAYOUT)]

    async def connect(self, transfer: Any, addresses: list[Any], **options: Any) -> None:
        self.version = 0

    async def pull_weights(self, version: int) -> float:
        await asyncio.sleep(0)
        self.version = version
        return 0.0

    async def weight_digests(self) -> list[dict]:
        return [{("w", Box.whole((1,))): self.version}]

    async def generate(
        self, requests: list[GenerationRequest], *, fresh: bool = False
    ) -> list[Completion]:
        if self.marks.began is None and not requests[0].request_id.startswith("canary"):
            self.marks.began = time.process_time(), time.perf_counter()
        await asyncio.sleep(0)
        return [self._say(min(TOKENS, request.sampling.max_tokens)) for request in requests]

    def _say(self, count: int) -> Completion:
        """Lists of its own, as a message brings them."""
        return Completion(
            tokens=[6] * count,
            logprobs=[-1.0] * count,
            versions=[self.version] * count,
            finish_reason="length",
        )


class Rewards(Mesh):
    """The more samples, the better."""

    restarts = 0

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Rollout]:
        await asyncio.sleep(0)
        return [
            Rollout.single_turn(
                prompt,
                each,
                sample=i,
                text="1 2 3",
                reward=i,
                metrics={"correct": 0.0},
            )
            for i, each in enumerate(completions)
        ]


def configured(pipeline: str, bound: int, rollouts: int) -> RLConfig:
    """About ``rollouts`` rollouts in all, in whole steps."""
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


def loop_in(folder: str, config: RLConfig, marks: Marks) -> RLTrainer:
    """The trainer's loop over meshes that take no time."""
    task = config.task.build(seed=0, model=config.model)
    trainer: Any = Trainer(marks)
    meshes = SimpleNamespace(
        models=lambda: {"trainer": trainer},
        generator=lambda number: Generator(marks),
        rewards=lambda task, warn: Rewards(),
    )
    record = RunRecord(folder)
    session = Session(session_config(config), task=config.task, folder=record.folder, meshes=meshes)
    return RLTrainer(config, task, session, record, Progress(config.steps, quiet=True))


def run(config: RLConfig) -> tuple[Marks, float]:
    """Run the controller from start to end in a folder of its own; also the largest staleness of a
    token.
    """
    with tempfile.TemporaryDirectory() as folder:
        marks = Marks()
        loop = loop_in(folder, config, marks)
        record = loop.record
        asyncio.run(loop.run())
        if loop.ledger.trained != config.steps * config.rollout.prompts_per_step:
            raise RuntimeError("the run did not train on all it should have: nothing was measured")
        return marks, max(row["rollout/staleness_max"] for row in record.read_metrics())


def costs(config: RLConfig, marks: Marks) -> tuple[float, float]:
    """CPU and wall time of one rollout, in s."""
    assert marks.began is not None
    count = config.steps * config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    cpu, wall = ((end - begin) / count for begin, end in zip(marks.began, marks.ended, strict=True))
    return cpu, wall


def measure(pipeline: str, bound: int, *, repeats: int, long: int) -> dict[str, Any]:
    """One pipeline: runs of both lengths, in turn."""
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


def fill(loop: RLTrainer, tokens: int) -> None:
    """Have ``SAVED`` finished rollouts of ``tokens`` tokens in the ledger; no two share a list, as
    from messages.
    """
    ledger = loop.ledger
    samples = SAVED // (2 * loop.config.rollout.prompts_per_step)
    while ledger.admits(0):
        prompt_id = ledger.admit(0)
        prompt = Prompt(
            prompt_id=prompt_id, tokens=[*range(1000, 1256)], text="prompt " * 64, answer="1"
        )
        group = [
            Rollout.single_turn(
                prompt,
                Completion(
                    tokens=[*range(1000, 1000 + tokens)],
                    logprobs=[-place / 7 for place in range(tokens)],
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
        raise RuntimeError("the ledger does not hold what was to be measured")


def checkpoint(*, repeats: int, tokens: int) -> dict[str, float]:
    """Cost of a checkpoint to the event loop, and to the run."""
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
        ticking = asyncio.create_task(tick())
        await asyncio.sleep(0.01)
        pauses.clear()
        for _ in range(repeats):
            loop.step += 1
            began = time.perf_counter()
            await loop.checkpoint()
            times.append(time.perf_counter() - began)
            await asyncio.sleep(0.01)
        ticking.cancel()

    with tempfile.TemporaryDirectory() as folder:
        loop = loop_in(folder, config, Marks())
        fill(loop, tokens)
        asyncio.run(save(loop))
        size = sum(path.stat().st_size for path in loop.checkpoints.path(1).iterdir())
    policy: Any = loop.session.trainer
    return {
        "checkpoint_pause_s": max(pauses),
        "checkpoint_s": statistics.median(times),
        "checkpoint_bytes": size,
        "checkpoint_message_bytes": policy.message_bytes,
    }


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


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
    run(configured("deterministic", 0, SHORT))  # what is imported and allocated once
    gc.freeze()  # as the program does
    for case in cases:
        rows.append(
            measure(*case, repeats=options.repeats, long=2 * SHORT if options.tiny else LONG)
        )
        show(rows[-1])
    saving = checkpoint(repeats=options.repeats, tokens=32 if options.tiny else SAVED_TOKENS)
    print(
        f"checkpoint: the event loop stands still for {saving['checkpoint_pause_s']:.3f} s at most "
        f"of {saving['checkpoint_s']:.2f} s; {saving['checkpoint_bytes'] / 1e6:.1f} MB written "
        f"once, {saving['checkpoint_message_bytes'] / 1e3:.1f} kB sent to a rank"
    )
    gc.unfreeze()
    result = {
        "rollouts_per_s": min(row["rollouts_per_s"] for row in rows),
        "cost_growth": max(row["cost_growth"] for row in rows),
        "memory_growth": max(row["memory_growth"] for row in rows),
        **saving,
        "pipelines": rows,
    }
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
