"""Parameters and optimizer state go to host memory and come back bit for bit."""

import pytest
import torch

from rl.compat.torch_internals import local_tensor
from rl.training.checkpoint import Checkpointer
from tests.kit.batches import ragged_batch
from tests.kit.scenes import (
    LOSS,
    MODELS,
    engine_of,
    gradients_of,
    learn,
    stale_parts,
    unequal,
    weights_of,
)


def resident(tensors) -> int:
    """Bytes that the tensors hold on their device."""
    return sum(local_tensor(tensor).untyped_storage().nbytes() for tensor in tensors)


def moments(engine) -> list[torch.Tensor]:
    (optimizer,) = engine.optimizers
    return [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]


def test_a_round_trip_between_calls_changes_nothing(model_name, folder):
    away, at_home = (engine_of(MODELS[model_name], folder=folder) for _ in range(2))
    live = away.shards()  # which a publisher holds
    for seed in range(3):
        for engine in (away, at_home):
            engine.forward(ragged_batch(seed=seed))
            engine.forward_backward(ragged_batch(seed=seed), LOSS.build())
            if engine is away:
                engine.offload()
                engine.onload()
        assert unequal(gradients_of(away), gradients_of(at_home)) == []
        assert away.optim_step() == at_home.optim_step()
        away.offload()
        away.onload(model=True, optimizer=False)
        outputs = [engine.forward(ragged_batch())["logprobs"] for engine in (away, at_home)]
        assert torch.equal(*outputs)
        away.onload()
        assert all(map(torch.equal, moments(away), moments(at_home)))
    assert unequal(weights_of(away), weights_of(at_home)) == []
    assert stale_parts(at_home, live) == []


def test_offload_frees_device_memory(model_name, folder):
    engine = engine_of(MODELS[model_name], folder=folder)
    learn(engine, ragged_batch())
    engine.forward_backward(ragged_batch(), LOSS.build())
    weights = list(engine.model.parameters())
    state = moments(engine)
    gradients = [parameter.grad for parameter in weights]
    before = resident(weights), resident(state), resident(gradients)
    assert min(before) > 0
    engine.offload()
    assert resident([*weights, *state, *gradients]) == 0
    engine.onload(optimizer=False)
    assert (resident(weights), resident(state)) == (before[0], 0)
    engine.onload()
    assert (resident(weights), resident(state), resident(gradients)) == before


def test_offload_releases_memory_to_other_processes_once_it_is_free(folder, monkeypatch):
    engine = engine_of(MODELS["tied_fused"], folder=folder)
    left = []
    note = lambda: left.append(resident(engine.model.parameters()))  # noqa: E731
    monkeypatch.setattr("rl.model.host_memory.release_cached_memory", note)
    engine.offload()
    assert left[0] == 0


def test_offloaded_parts_are_not_used(folder):
    engine = engine_of(MODELS["tied_fused"], folder=folder)
    learn(engine, ragged_batch())
    before = weights_of(engine)
    checkpointer = Checkpointer(engine, MODELS["tied_fused"], folder=folder)
    engine.offload()
    calls = {
        "save": lambda: checkpointer.save(1, {}),
        "load": checkpointer.load,
        "export_hf": lambda: checkpointer.export_hf(f"{folder}/export"),
        "forward": lambda: engine.forward(ragged_batch()),
        "forward_backward": lambda: engine.forward_backward(ragged_batch(), LOSS.build()),
        "optim_step": engine.optim_step,
        "shards": engine.shards,
    }
    for name, call in calls.items():
        with pytest.raises(RuntimeError, match=f"{name}: the model is offloaded; call onload"):
            call()
    engine.onload(optimizer=False)
    with pytest.raises(RuntimeError, match="forward_backward: the optimizer is offloaded"):
        calls["forward_backward"]()
    engine.onload()
    checkpointer.close()
    assert unequal(before, weights_of(engine)) == []
