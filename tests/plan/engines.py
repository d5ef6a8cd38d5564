"""Memory of real engines, to compare with plans. The functions run on separate ranks."""

import os
from typing import Any

import torch

from rl.compat.torch_internals import local_tensor
from rl.config import RLConfig
from rl.training.engine import TrainingEngine
from rl.training.sharded_model import named_adapters, named_weights
from rl.types import Batch
from rl.weights.shared_memory import SharedMemoryPublisher
from rl.weights.transport import Transfer
from tests.kit.memory import resident
from tests.kit.scenes import share

# so that no activation has the shape of a weight
ROWS = 9
LENGTH = 33


def batch_of(vocab_size: int) -> Batch:
    tokens = ROWS * LENGTH
    weights = torch.ones(tokens)
    weights[::LENGTH] = 0.0
    names = ("advantages", "behaviour_logprobs", "returns", "old_values")
    return Batch(
        tokens=torch.randint(vocab_size, (tokens,)),
        lengths=torch.tensor([LENGTH] * ROWS),
        loss_weights=weights,
        columns={name: torch.zeros(tokens) for name in names},
    )


def engine_of(config: RLConfig, role: str, folder: str) -> TrainingEngine:
    found = config.models()[role]
    return TrainingEngine(
        found.trainer, found.model, head=found.head, seed=0, steps=5, folder=folder
    )


def accumulate(engine: TrainingEngine, config: RLConfig, role: str) -> None:
    loss = config.critic.loss if role == "critic" else config.algorithm.loss
    engine.forward_backward(share(engine, batch_of(config.model.vocab_size)), loss.build())


def held(config: RLConfig, role: str, folder: str) -> dict[str, int]:
    """Return the bytes of a rank's tensors after a step, by their names in a plan."""
    engine = engine_of(config, role, folder)
    accumulate(engine, config, role)
    gradients = [
        parameter.grad for parameter in engine.model.parameters() if parameter.grad is not None
    ]
    sizes = {
        "parameters": storages(named_weights(engine.model).values()),
        "adapters": storages(named_adapters(engine.model).values()),
        "gradients": storages(gradients),
        "RoPE tables": storages(
            buffer for name, buffer in engine.model.named_buffers() if name.endswith("rope.cache")
        ),
    }
    engine.optim_step()
    states = [
        value
        for each in engine.optimizers
        for state in each.state.values()
        for value in state.values()
    ]
    sizes["optimizer states"] = storages(value for value in states if value.dim())
    if role == "trainer":
        parts = engine.shards().values()
        sizes["merged weights"] = storages(engine.adapters.merged.buffers.values())
        publisher = SharedMemoryPublisher([*parts], transfer_of(config), rank=0)
        sizes["push slots"] = sum(os.fstat(fd).st_size for fd in publisher.address.fds)
        publisher.close()
    engine.close()
    return sizes


def transfer_of(config: RLConfig) -> Transfer:
    return Transfer("shared_memory", getattr(torch, config.generator.dtype), (), ())


def storages(tensors: Any) -> int:
    """Bytes of their storages, each once."""
    found = {
        local_tensor(t).untyped_storage()._cdata: local_tensor(t).untyped_storage().nbytes()
        for t in tensors
    }
    return sum(found.values())


def grown(config: RLConfig, folder: str) -> dict[str, int]:
    """Return the growth of private memory after backward, after a step, by a publisher."""
    before = resident("RssAnon")
    engine = engine_of(config, "trainer", folder)
    accumulate(engine, config, "trainer")
    sizes = {"with gradients": resident("RssAnon") - before}
    engine.optim_step()
    sizes["with states"] = resident("RssAnon") - before
    shared = resident("RssShmem")
    publisher = SharedMemoryPublisher([*engine.shards().values()], transfer_of(config), rank=0)
    sizes["push slots"] = resident("RssShmem") - shared
    publisher.close()
    engine.close()
    return sizes


def saved(config: RLConfig, folder: str) -> int:
    """Bytes that autograd saves for the backward pass of one micro-batch, parameters left out."""
    engine = engine_of(config, "trainer", folder)
    accumulate(engine, config, "trainer")
    shapes = {
        tuple(size) for p in engine.model.parameters() for size in (p.shape, reversed(p.shape))
    }
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tuple(tensor.shape) not in shapes:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        accumulate(engine, config, "trainer")
    engine.close()
    return sum(storage.nbytes() for storage in kept.values())


def gathered(config: RLConfig, folder: str) -> int:
    """Return the bytes of the parameters of the model at the end of a forward pass."""
    engine = engine_of(config, "trainer", folder)
    found: list[int] = []
    engine.model.register_forward_hook(lambda model, *_: found.append(storages(model.parameters())))
    accumulate(engine, config, "trainer")
    engine.close()
    return found[-1]
