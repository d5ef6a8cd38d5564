"""Log-probs of a mixture of experts in bfloat16: those of the trainer against those of the
generator, with experts that the trainer's routers choose and with those that the generator
recorded; and the cost of recording.

Usage: python scripts/bench/router_replay.py [--rounds N] [--json]

The generator samples completions of random prompts. The trainer, with the same weights, computes
the log-probs of their tokens twice. "replayed_over_free" is the mean distance of a log-prob from
that of the generator, with recorded experts over without. "differing" is the share of tokens that
the trainer's routers would send to other experts in at least one layer.

Two generators, of which one records experts, sample the same completions by turns. "recording" is
the CPU time of that one over that of the other, each the least of the rounds: other programs only
add to it.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import psutil
import torch
from generator import SAMPLES, Case, Ours, rollouts_of
from programs import cpu_seconds
from ranks import become_rank
from torchtitan.config import TrainingConfig

import rl  # noqa: F401  # before anything imports torchtitan, which asks it for the device
from rl.algorithms.batch import make_batch
from rl.generation.generator_config import GeneratorConfig
from rl.model.router import routers_of
from rl.model.shape import ModelConfig
from rl.training.checkpoint import Checkpointer
from rl.training.engine import TrainingEngine
from rl.training.trainer_config import TrainerConfig
from rl.types import Completion, GenerationRequest

MODEL = ModelConfig(
    vocab_size=512,
    dim=256,
    n_layers=8,
    n_heads=4,
    n_kv_heads=2,
    head_dim=64,
    num_experts=64,
    experts_per_token=8,
    moe_hidden_dim=96,
    max_seq_len=256,
)
CASE = Case(model=MODEL, prompts=8, prompt_tokens=48, new_tokens=48)


def engine_of(folder: Path, model: ModelConfig = MODEL) -> TrainingEngine:
    """Return a trainer in this process, which computes in bfloat16 with recorded experts."""
    become_rank(0, 1)
    config = TrainerConfig(
        training=TrainingConfig(mixed_precision_param="bfloat16"),
        micro_batch_size=CASE.prompts * SAMPLES,
        packing=False,
        router_replay="generator",
    )
    return TrainingEngine(config, model, seed=0, steps=1, folder=str(folder))


def write_weights(folder: Path) -> None:
    """Write a model whose random weights are scaled up, so that some tokens are likely."""
    engine = engine_of(folder)
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)
    checkpointer = Checkpointer(engine, MODEL, folder=str(folder))
    checkpointer.export_hf(str(folder / "model"))
    checkpointer.close()


def gaps(
    folder: Path, requests: list[GenerationRequest], completions: list[Completion]
) -> dict[str, float]:
    """Return mean distances of the trainer's log-probs from those of the generator, and the share
    of tokens with other experts.
    """
    model = replace(MODEL, hf_path=str(folder / "model"))
    engine = engine_of(folder, model)
    checkpointer = Checkpointer(engine, model, folder=str(folder))
    checkpointer.load()
    batch = make_batch(rollouts_of(requests, completions))
    preferred = list[torch.Tensor]()  # of each layer, [sequences, cells of a row, experts]
    for router in routers_of(engine.model):
        router.on_choice = lambda ids, scores: preferred.append(ids)
    behaviour = batch.columns["behaviour_logprobs"]
    found = {}
    for name, each in (("replayed", batch), ("free", replace(batch, experts=None))):
        preferred.clear()
        error = (engine.forward(each)["logprobs"] - behaviour).abs()
        found[f"{name}_gap"] = float(error[batch.loss_mask].mean())
    length = int(batch.lengths[0])
    assert batch.experts is not None, "the generator records experts"
    recorded = torch.from_numpy(batch.experts.ids).long().unflatten(0, (-1, length))[:, :-1]
    chosen = torch.stack(preferred, dim=2)[:, : length - 1]
    others = (chosen.sort(-1).values != recorded.sort(-1).values).any(-1)
    return {
        "replayed_over_free": found["replayed_gap"] / found["free_gap"],
        "differing": float(others.any(-1).float().mean()),
        "differing_in_a_layer": float(others.float().mean()),
        **found,
    }


def in_a_process(function: Callable[..., Any], *args: Any) -> Any:
    """Return the result of a function in a new process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


def run(rounds: int, folder: Path) -> dict[str, float]:
    """Sample with both generators by turns, then compute with the trainer."""
    in_a_process(write_weights, folder)
    sides = {}
    for name, records in (("plain", False), ("recording", True)):
        config = GeneratorConfig(dtype="bfloat16", kv_cache_gib=0.25, record_experts=records)
        shutil.copytree(folder / "model", folder / name)
        sides[name] = Ours(config, MODEL, folder / name)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    requests = CASE.requests(0)
    completions = {name: side.generate(requests, SAMPLES) for name, side in sides.items()}
    here = psutil.Process()
    for number in range(1, rounds + 1):
        for name in [*sides][:: 1 if number % 2 else -1]:
            begun = cpu_seconds(here)
            sides[name].generate(CASE.requests(number), SAMPLES)
            seconds[name].append(cpu_seconds(here) - begun)
    for side in sides.values():
        side.close()
    found = in_a_process(gaps, folder, requests, completions["recording"].completions)
    return found | {"recording": min(seconds["recording"]) / min(seconds["plain"])}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=12, help="turns that each generator takes")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = run(arguments.rounds, Path(folder))
    for name in ("free", "replayed"):
        print(f"{name:9} {result[f'{name}_gap']:.5f} nats from the generator's log-probs")
    print(", ".join(f"{name} {value:.3f}" for name, value in result.items() if "gap" not in name))
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
