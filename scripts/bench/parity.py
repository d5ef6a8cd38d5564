"""CPU time of generation and of training with ``parity`` bitwise against close.

Usage: python scripts/bench/parity.py [--dtype DTYPE] [--rounds N] [--json]

Two sessions with the same random model sample completions of random prompts and compute the
gradients of these, by turns. "generation" and "training" are the CPU seconds of the bitwise session
over those of the close one, each the least of the rounds: other programs only add to it.
"differing" is the share of tokens whose log-probs differ between trainer and generator, by session.
"""

import argparse
import asyncio
import json
import os
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import psutil
from generator import SAMPLES, Case, rollouts_of
from programs import cpu_seconds
from torchtitan.config import TrainingConfig

import rl
from rl.model.parity import Parity

MODEL = rl.ModelConfig(
    vocab_size=4096,
    dim=384,
    n_layers=6,
    n_heads=6,
    n_kv_heads=2,
    head_dim=64,
    hidden_dim=1024,
    max_seq_len=256,
)
CASE = Case(model=MODEL, prompts=8, prompt_tokens=96, new_tokens=64)
SIDES: tuple[Parity, ...] = ("close", "bitwise")


def config_of(dtype: Any, parity: Parity) -> rl.SessionConfig:
    """Return a session of one trainer rank and one generator rank, with one thread each."""
    trainer = rl.TrainerConfig(
        training=TrainingConfig(mixed_precision_param=dtype),
        micro_batch_size=CASE.prompts * SAMPLES,
        threads=1,
    )
    generator = rl.GeneratorConfig(dtype=dtype, kv_cache_gib=0.25, threads=1)
    return rl.SessionConfig(model=MODEL, trainer=trainer, generator=generator, parity=parity)


async def measured(dtype: str, rounds: int, folder: Path) -> dict[str, Any]:
    """Return ratios of CPU seconds, and the share of tokens with other log-probs by side."""
    here = psutil.Process()
    seconds: dict[str, list[float]] = {}
    differing = {}
    async with AsyncExitStack() as stack:
        sessions = {}
        for side in SIDES:
            opened = rl.Session(config_of(dtype, side), folder=folder / side)
            sessions[side] = await stack.enter_async_context(opened)
        for number in range(rounds + 1):
            for side in SIDES[:: 1 if number % 2 else -1]:
                marks = [cpu_seconds(here)]
                requests = CASE.requests(number)
                completions = await sessions[side].sample(requests)
                marks.append(cpu_seconds(here))
                rollouts = rollouts_of(requests, completions)
                batch = rl.make_batch(rollouts, [1.0, -1.0] * (len(rollouts) // 2))
                await sessions[side].forward_backward(batch, rl.losses.grpo())
                marks.append(cpu_seconds(here))
                if number == 0:  # also warms up
                    outputs = await sessions[side].forward(batch)
                    errors = outputs["logprobs"] - batch.columns["behaviour_logprobs"]
                    sampled = errors[batch.loss_weights > 0]
                    differing[side] = float((sampled != 0).float().mean())
                    continue
                seconds.setdefault(f"generation/{side}", []).append(marks[1] - marks[0])
                seconds.setdefault(f"training/{side}", []).append(marks[2] - marks[1])
    least = {name: min(each) for name, each in seconds.items()}
    ratios = {
        part: least[f"{part}/bitwise"] / least[f"{part}/close"]
        for part in ("generation", "training")
    }
    return {"dtype": dtype, **ratios, "differing": differing, "cpu_seconds": least}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=7, help="turns that each session takes")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(measured(arguments.dtype, arguments.rounds, Path(folder)))
    for part in ("generation", "training"):
        close, bitwise = (result["cpu_seconds"][f"{part}/{side}"] for side in SIDES)
        print(
            f"{part:10} {close:6.2f} CPU s close, {bitwise:6.2f} bitwise: {result[part]:.2f} times"
        )
    shares = ", ".join(f"{share:.1%} {side}" for side, share in result["differing"].items())
    print(f"tokens with differing log-probs: {shares}")
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
