"""The side of the session: takes the steps and draws the samples of tinker_work.py.

Usage: python tinker_session.py FOLDER STEPS. Prints seconds of each step, samples per second, and
the seconds of each client's samples, as JSON. ``served`` is the config of the server, which makes
the same session.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

import numpy as np
import tinker_work as work
from torchtitan.components.lora import LoRAConverter

import rl
from configs.serve_tiny import serve_tiny
from rl.config.serve import ServeConfig
from rl.tinker.forward_backward import batch_of
from rl.tinker.losses import TinkerLoss


def served() -> ServeConfig:
    """Return the config of the server; ``model.hf_path`` is set on the command line."""
    config = serve_tiny()
    config.model = rl.ModelConfig(max_seq_len=work.MODEL["max_seq_len"])
    config.names = (work.NAME,)
    config.trainer.lora = LoRAConverter.Config(rank=work.RANK)  # the output head is tied
    return config


def training_batch() -> rl.Batch:
    rows = [work.tokens(f"datum/{number}", work.TOKENS) for number in range(work.DATUMS)]
    tokens = [np.array(row[:-1]) for row in rows]
    batch = batch_of(tokens, [np.array(row[1:]) for row in rows])
    batch.columns["weights"] = batch.loss_weights.clone()
    return batch


async def measured(folder: Path, steps: int) -> dict[str, object]:
    config = served()
    config.model.hf_path = str(folder)
    batch = training_batch()
    loss = TinkerLoss.Config(name="cross_entropy")
    adam = {"lr": work.LEARNING_RATE, "betas": (0.9, 0.95), "eps": 1e-12, "weight_decay": 0.0}
    async with rl.Session(config.session()) as session:
        adapter = rl.AdapterConfig(rank=work.RANK, seed=0, unembedding=False)
        await session.create_adapter("one", adapter)
        seconds = []
        for _ in range(steps):
            begin = time.perf_counter()
            _, metrics = await session.forward_backward(batch, loss, adapter="one")
            await session.optim_step(adapter="one", denominator=1.0, max_norm=float("inf"), **adam)
            seconds.append(time.perf_counter() - begin)
        snapshot = session.folder / "snapshot"
        await session.save_snapshot(snapshot, adapter="one")

        async def draw(client: int) -> float:
            begin = time.perf_counter()
            for number in range(work.SAMPLES):
                request = rl.GenerationRequest(
                    request_id=f"{client}/{number}",
                    prompt_tokens=work.tokens(f"prompt/{client}/{number}", work.PROMPT_TOKENS),
                    seed=number,
                    sampling=rl.Sampling(max_tokens=work.NEW_TOKENS),
                )
                await session.sample([request], weights=snapshot)
            return time.perf_counter() - begin

        await draw(0)
        begin = time.perf_counter()
        waits = await asyncio.gather(*map(draw, range(work.CLIENTS)))
        rate = work.CLIENTS * work.SAMPLES / (time.perf_counter() - begin)
    found = {"seconds": seconds, "samples_per_s": rate, "waits": waits}
    return {**found, "loss": metrics["loss_sum"]}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measured(Path(sys.argv[1]), int(sys.argv[2])))))
