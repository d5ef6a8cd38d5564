"""Moments in host memory change no bit of a run, and the device has two parts of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torchtitan.components.lora import LoRAConverter
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig, default_adamw

import rl.training.offloaded_optimizers as module
from rl.compat.torch_internals import local_tensor
from rl.training.engine import TrainingEngine
from rl.training.offloaded_optimizers import parts_of
from tests.kit.batches import ragged_batch
from tests.kit.layouts import LAYOUTS
from tests.kit.scenes import (
    MODELS,
    TIED_FUSED,
    checkpointer_of,
    engine_of,
    learn,
    share,
    unequal,
    weights_of,
    whole,
)
from tests.kit.tables import long

KINDS: dict[str, dict[str, Any]] = {
    "fused": {},
    "foreach": {"implementation": "foreach"},
    "for-loop": {"implementation": "for-loop"},
    "amsgrad": {"amsgrad": True},
}
PART = 2**12
"""Size of a part in these tests: every model has several."""


def optimizer_of(implementation: str = "fused", **options: Any) -> OptimizersContainer.Config:
    """Return two parameter groups and two kinds of optimizers."""
    adamw = default_adamw(lr=1e-2, **options)
    norms = ParamGroupConfig(pattern="norm", optimizer_name="Adam", optimizer_kwargs={"lr": 3e-2})
    biases = replace(adamw.param_groups[0], pattern=r"wo|lora_b")
    groups = [norms, biases, *adamw.param_groups]
    return replace(adamw, param_groups=groups, implementation=implementation)


def state_of(engine: TrainingEngine) -> dict[str, torch.Tensor]:
    """Return the whole state of the optimizers."""
    state = engine.optimizers.state_dict()
    return {key: whole(each) for key, each in state.items() if isinstance(each, torch.Tensor)}


def play(model: str, layout: str, folder: str, kind: str = "fused") -> list[list[str]]:
    """Return what differs between engines with and without offloading after three steps, and after
    two more of engines that load the checkpoint of the other one.
    """
    places = [Path(folder) / name for name in ("host", "device")]
    options = {"layout": LAYOUTS[layout], "optimizer": optimizer_of(**KINDS[kind]), "warmup": 2}
    if kind == "lora":
        options |= {"lora": LoRAConverter.Config(rank=4), "optimizer": default_adamw(lr=1e-2)}
    build = lambda place, offloads: engine_of(  # noqa: E731
        MODELS[model], folder=str(place), offload_optimizer=offloads, **options
    )
    differing = []
    with patch.object(module, "PART_BYTES", PART):
        engines = [build(place, place.name == "host") for place in places]
        for steps in (range(3), range(3, 5)):
            for engine, place in zip(engines, places, strict=True):
                for seed in steps:
                    learn(engine, share(engine, ragged_batch(seed=seed)))
                    engine.offload()
                    engine.onload()
                checkpointer = checkpointer_of(engine, str(place), MODELS[model])
                checkpointer.save(steps[-1], {})
                checkpointer.close()
            differing += [unequal(*map(weights_of, engines)), unequal(*map(state_of, engines))]
            for engine, place in zip(engines, reversed(places), strict=True):
                checkpointer = checkpointer_of(engine, str(place), MODELS[model])
                checkpointer.load(2)
                checkpointer.close()
    return differing


KINDS["lora"] = {}
PLACES = [
    ("tied_fused", "alone", "foreach"),
    *(long("tied_fused", "alone", kind) for kind in KINDS if kind != "foreach"),
    long("tied_fused", "fsdp2", "fused"),
    long("tied_fused", "fsdp2", "lora"),
    long("biased", "hsdp4", "fused"),
    long("untied_split", "fsdp2_tp2", "fused"),
    long("experts", "fsdp2_tp2_ep2", "fused"),
]


@pytest.mark.parametrize(("model", "layout", "kind"), PLACES)
def test_moments_on_the_host_change_no_bit(once, model, layout, kind):
    answers, _ = once(play, model, layout, kind)
    for answer in answers:
        assert answer == [[], [], [], []]


def test_short_moments_take_half_of_the_memory(folder):
    """torch has the step itself on CUDA alone."""
    sizes = []
    for implementation in ("fused", "fused_opt_states_bf16"):
        optimizer = optimizer_of(implementation)
        engine = engine_of(TIED_FUSED, folder=folder, offload_optimizer=True, optimizer=optimizer)
        moments = {key: each for key, each in state_of(engine).items() if "exp_avg" in key}
        sizes.append({key: each.nbytes for key, each in moments.items()})
    assert {each.dtype for each in moments.values()} == {torch.bfloat16}
    assert sizes[0] == {key: 2 * size for key, size in sizes[1].items()}


def test_a_part_is_what_fits_or_one_larger_parameter(monkeypatch):
    monkeypatch.setattr(module, "PART_BYTES", 10)
    sizes = [4, 6, 1, 12, 3, 3, 3, 3]
    assert [sizes[part] for part in parts_of(sizes)] == [[4, 6], [1], [12], [3, 3, 3], [3]]
    assert [sizes[part] for part in parts_of([20])] == [[4]]


def test_the_device_has_two_parts_and_hooks_of_the_container_run_once(folder, monkeypatch):
    monkeypatch.setattr(module, "PART_BYTES", PART)
    engine = engine_of(TIED_FUSED, folder=folder, offload_optimizer=True)
    calls = []
    engine.optimizers.register_step_pre_hook(lambda *_: calls.append("step"))
    buffers: list[torch.Tensor] = []
    step = module._Part.step

    def noted(part: Any, optimizer: torch.optim.Optimizer, memory: torch.Tensor) -> None:
        buffers.append(memory)
        step(part, optimizer, memory)

    monkeypatch.setattr(module._Part, "step", noted)
    learn(engine, ragged_batch())
    (optimizer,) = engine.optimizers
    moments = [local_tensor(state["exp_avg"]) for state in optimizer.state.values()]
    homes, places = (
        {each.untyped_storage().data_ptr() for each in tensors} for tensors in (moments, buffers)
    )
    assert calls == ["step"]
    assert len(buffers) == len(homes) > module.BUFFERS == len(places)
    assert not homes & places
