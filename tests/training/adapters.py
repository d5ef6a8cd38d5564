"""Runs of an engine with adapters, in any layout."""

import hashlib
from typing import Any

import torch
from torchtitan.components.lora import LoRAConverter

from rl.compat.torch_internals import local_tensor
from rl.model.digest import digests
from rl.model.shards import Box
from rl.training.checkpoint import Checkpointer
from rl.training.engine import TrainingEngine
from rl.training.model import is_adapter, local_box
from tests.training.batches import ragged_batch
from tests.training.layouts import LAYOUTS
from tests.training.scenes import (
    MODELS,
    TEMPERATURE,
    accumulate,
    engine_of,
    learn,
    share,
    weights_of,
)

LORA = LoRAConverter.Config(rank=4, alpha=6.0)
STEPS = 3


def adapted(model: str, layout: str, folder: str, **trainer: Any) -> TrainingEngine:
    return engine_of(
        MODELS[model], folder=folder, layout=LAYOUTS[layout], lora=LORA, lr=1e-2, **trainer
    )


@torch.no_grad()
def wake(engine: TrainingEngine) -> None:
    """Give every B, which begins at 0, the same values in every layout."""
    for name, parameter in engine.model.named_parameters():
        if "lora_b" in name:
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
            full = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * 0.3
            local_tensor(parameter).copy_(
                full[local_box(parameter).slices_in(Box.whole(full.shape))]
            )
    engine.weights_loaded()


def merged(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """W + alpha / rank * B @ A of whole weights, by the names of the model without adapters."""

    def product(name: str) -> torch.Tensor | float:
        a, b = (weights.get(name.replace(".weight", f".lora_{x}.weight")) for x in "ab")
        return 0.0 if a is None else LORA.alpha / LORA.rank * (b @ a)

    return {
        name: weight + product(name) for name, weight in weights.items() if not is_adapter(name)
    }


def merge_error(engine: TrainingEngine) -> float:
    """Largest difference of this rank's parts from those of whole weights that are merged here."""
    whole = merged(weights_of(engine))
    shards = engine.shards()
    assert [*shards] == [*whole]
    boxes = {name: shard.box.slices_in(Box.whole(shard.shape)) for name, shard in shards.items()}
    return max(
        float((shard.tensor - whole[name][boxes[name]]).abs().max())
        for name, shard in shards.items()
    )


def play_adapted(model: str, layout: str, folder: str) -> dict[str, Any]:
    """Return the values of a layout that the tests of adapters compare."""
    engine = adapted(model, layout, folder)
    result: dict[str, Any] = {"fresh": weights_of(engine)}
    shards = engine.shards()  # before the first forward, as a publisher takes them
    result["digests"] = [digests(shards.values())]
    wake(engine)
    result["forward"] = engine.forward(share(engine, ragged_batch()), temperature=TEMPERATURE)
    result["first"] = accumulate(engine, ragged_batch())
    result["losses"] = [learn(engine, ragged_batch(seed=1))["loss/mean"] for _ in range(STEPS)]
    result["merge_error"] = merge_error(engine)
    result["trained"] = weights_of(engine)

    checkpointer = Checkpointer(engine, MODELS[model], folder=folder)
    checkpointer.save(1, {"step": 1})
    checkpointer.export_hf(f"{folder}/export")
    result["digests"].append(digests(shards.values()))
    engine.offload()
    engine.onload()
    result["next"] = learn(engine, ragged_batch(seed=2))
    now = engine.shards()
    result["stale_parts"] = [
        name for name, shard in shards.items() if not torch.equal(shard.tensor, now[name].tensor)
    ]
    checkpointer.close()
    return result
