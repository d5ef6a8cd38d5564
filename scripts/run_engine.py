r"""Run the training engine by itself, for profiling and debugging, on random batches.

OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 scripts/run_engine.py --config quickstart --steps 10 \
    --trainer.parallelism.data_parallel_shard_degree 2 [--profile DIR]

Takes a config by name and any override, as ``python -m rl.train`` does. Weights are random too: of
a Hugging Face folder only the sizes are read.
"""

import argparse
import math
import os
import statistics
import sys
import time
from pathlib import Path

import torch
from torch.profiler import profile

from rl.algorithms.batch import reduced
from rl.cli.arguments import parse_config
from rl.config import RLConfig
from rl.errors import EXIT_CONFIG, ConfigError
from rl.host.platform import device_type
from rl.model.shape import shape_of
from rl.training.engine import TrainingEngine
from rl.types import Batch


def main() -> int:
    """Run on one rank; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--profile", type=Path, metavar="DIR", help="trace one step more, to DIR/rank-N.json"
    )
    arguments, overrides = parser.parse_known_args()
    rank = os.environ.get("RANK", "0")
    ranks = os.environ.get("WORLD_SIZE", "no")
    try:
        _, config = parse_config(overrides, program="torchrun scripts/run_engine.py")
        if ranks != str(config.trainer.ranks):
            raise ConfigError(
                f"torchrun started {ranks} ranks, but the config's parallelism degrees come to "
                f"{config.trainer.ranks}: give torchrun --nproc-per-node {config.trainer.ranks}, "
                "or change --trainer.parallelism.*_degree"
            )
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG

    engine = TrainingEngine(
        config.trainer, config.model, seed=config.seed, steps=config.steps + 1, folder="runs"
    )
    speeds = []
    for step in range(1, config.steps + 1):
        batch = random_batch(config, seed=step)
        start = time.perf_counter()
        metrics = train(engine, batch, config)
        speeds.append(int(batch.lengths.sum()) / (time.perf_counter() - start))
        if rank == "0":
            numbers = (
                f"loss {metrics['loss/mean']:+.4f}  grad norm {metrics['trainer/grad_norm']:.4f}"
            )
            print(f"step {step}  {numbers}  {speeds[-1]:,.0f} tokens/s", flush=True)
    if rank == "0":
        print(
            f"mean after the first step: {statistics.mean(speeds[1:] or speeds):,.0f} tokens/s",
            flush=True,
        )
    if arguments.profile is not None:
        arguments.profile.mkdir(parents=True, exist_ok=True)
        with profile() as trace:
            train(engine, random_batch(config, seed=0), config)
        trace.export_chrome_trace(str(arguments.profile / f"rank-{rank}.json"))
    engine.close()
    return 0


def random_batch(config: RLConfig, seed: int) -> Batch:
    """Return the sequences of one step of ``config``: random tokens, with prompts and completions
    of random lengths.
    """
    draw = torch.Generator().manual_seed(seed)
    vocab_size = shape_of(config.model).vocab_size
    count = config.rollout.prompts_per_step
    count *= config.rollout.samples_per_prompt
    prompts = torch.randint(1, config.task.max_prompt_tokens + 1, (count,), generator=draw)
    completions = torch.randint(1, config.rollout.max_tokens + 1, (count,), generator=draw)
    owner = torch.repeat_interleave(torch.arange(count), prompts + completions)
    completion_mask = (
        torch.cat([torch.arange(int(n)) for n in prompts + completions]) >= prompts[owner]
    )
    uniform = torch.full(owner.shape, -math.log(vocab_size))
    advantages = torch.randn(count, generator=draw)[owner]
    batch = Batch(
        tokens=torch.randint(vocab_size, owner.shape, generator=draw),
        lengths=prompts + completions,
        loss_weights=completion_mask.float(),
        columns={
            "advantages": advantages,
            "behaviour_logprobs": uniform,
            "reference_logprobs": uniform,
        },
    )
    return reduced(batch, config.algorithm.loss.reduction, config.rollout.max_tokens)


def train(engine: TrainingEngine, batch: Batch, config: RLConfig) -> dict[str, float]:
    """Take one optimizer step on this rank's share of the batch. Every rank has the whole batch."""
    mine = batch.select(batch.shares(engine.dp_degree)[engine.dp_rank])
    loss = config.algorithm.loss.build()
    temperature = config.rollout.temperature
    _, metrics = engine.forward_backward(mine, loss, temperature=temperature)
    metrics |= engine.optim_step()
    torch.get_device_module(device_type()).synchronize()
    return metrics


if __name__ == "__main__":
    raise SystemExit(main())
