"""Only adapters learn, in any layout; merged weights are pushed and exported, and PEFT agrees."""

import hashlib
import itertools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.lora import LoRAConverter

from rl.compat.torch_internals import local_tensor
from rl.errors import RunError
from rl.model.digest import digests, merge_digests
from rl.model.families import BUILT_IN, family_named
from rl.model.shards import Box
from rl.training.checkpoint import Checkpointer
from rl.training.engine import TrainingEngine
from rl.training.sharded_model import is_adapter, local_box
from tests.kit.batches import ragged_batch
from tests.kit.layouts import LAYOUTS
from tests.kit.model_folders import (
    tensors_of,
)
from tests.kit.reference import worst_error
from tests.kit.scenes import (
    CLAMPED,
    EXPERTS,
    FEW_CLAMPED,
    SIZES,
    TIED_FUSED,
    accumulate,
    engine_of,
    learn,
    loaded,
    saved,
    stale_parts,
    unequal,
    weights_of,
)
from tests.kit.scenes import MODELS as USUAL
from tests.kit.tables import cases
from tests.training.test_residency import resident

LORA = LoRAConverter.Config(rank=4, alpha=6.0)
STEPS = 3
MODELS = USUAL | {"clamped": CLAMPED, "few_clamped": FEW_CLAMPED}
TOGETHER = [("experts", "tp2")]
PAIRS = [
    *TOGETHER,
    ("biased", "fsdp2_tp2"),
    ("tied_fused", "fsdp2"),
    ("untied_split", "tp2_no_sp"),
    ("experts", "fsdp2_tp2"),
    ("experts", "ep2"),
    ("experts", "hsdp4"),
    ("experts", "fsdp2_cp2"),
    ("clamped", "cp2_tp2"),
    ("clamped", "tp2_no_sp"),
    ("clamped", "fsdp2_tp2_ep2"),
    ("few_clamped", "fsdp4"),
    ("few_clamped", "fsdp4_ep2"),
]
"""Models and layouts. FSDP cuts within the experts if there are more ranks than experts."""


def adapted(model: str, layout: str, folder: str, **trainer: Any) -> TrainingEngine:
    return engine_of(
        MODELS[model], folder=folder, layout=LAYOUTS[layout], lora=LORA, lr=1e-2, **trainer
    )


@torch.no_grad()
def wake(engine: TrainingEngine, size: float = 0.3) -> None:
    """Give every B, which begins at 0, the same values in every layout."""
    for name, parameter in engine.model.named_parameters():
        if "lora_b" in name:
            seed = int.from_bytes(
                hashlib.sha256(canonical_fqn(name).encode()).digest()[:4], "little"
            )
            generator = torch.Generator().manual_seed(seed)
            full = torch.randn(parameter.shape, generator=generator) * size
            local_tensor(parameter).copy_(
                full[local_box(parameter).slices_in(Box.whole(full.shape))]
            )
    engine.weights_loaded()


def merged(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """W + alpha / rank * B @ A of whole weights, by the names of the model without adapters. A of
    experts is stored transposed, as the weights of clamped ones are.
    """

    def product(name: str) -> torch.Tensor | float:
        layer, _, weight = name.rpartition(".")
        a, b = (weights.get(f"{layer}.lora_{x}.{weight}") for x in "ab")
        if a is None:
            return 0.0
        added = b @ a if a.ndim == 2 else b @ a.mT
        clamped = name.endswith(("EDG", "down_EFD"))
        return LORA.alpha / LORA.rank * (added.mT if clamped else added)

    return {
        name: weight + product(name) for name, weight in weights.items() if not is_adapter(name)
    }


@pytest.mark.parametrize("family", BUILT_IN)
def test_all_other_weights_of_each_family_are_frozen(tmp_path, family):
    model = EXPERTS if family_named(family).has_experts else TIED_FUSED
    engine = engine_of(replace(model, family=family), folder=str(tmp_path), lora=LORA)
    learning = {name: each.requires_grad for name, each in engine.model.named_parameters()}
    assert learning == {name: is_adapter(name) for name in learning}


def merge_error(engine: TrainingEngine) -> float:
    """Largest difference of this rank's parts from those of whole weights that are merged here."""
    whole = merged(weights_of(engine))
    shards = engine.shards()
    assert [*shards] == [*whole]
    boxes = {name: shard.box.slices_in(Box.whole(shard.shape)) for name, shard in shards.items()}
    return max(
        float((shard.tensor - whole[name][boxes[name]]).abs().max())
        for name, shard in shards.items()
        if shard.tensor.numel()
    )


def play_adapted(model: str, layout: str, folder: str) -> dict[str, Any]:
    """Return the values of a layout that the tests of adapters compare."""
    engine = adapted(model, layout, folder)
    result: dict[str, Any] = {"fresh": weights_of(engine)}
    shards = engine.shards()  # before the first forward, as a publisher takes them
    result["digests"] = [digests(shards.values())]
    wake(engine)
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
    result["stale_parts"] = stale_parts(engine, shards)
    checkpointer.close()
    return result


@pytest.fixture
def plays(once):
    """Return a function that plays a model in a layout, once: (what each rank answered, folder)."""

    def play(model: str, layout: str):
        answers, folder = once(play_adapted, model, layout)
        return answers, Path(folder)

    return play


@pytest.fixture(params=cases(PAIRS, TOGETHER), ids="-".join)
def pair(request, plays):
    """(what one rank answered, what each rank answered, the model, the layout's folder)."""
    model, layout = request.param
    (alone,), _ = plays(model, "alone")
    return alone, *plays(model, layout)


# One rank.


COUNTS = {"biased": 5, "untied_split": 7, "experts": 5, "clamped": 4}
"""Weights of a layer that have adapters."""


@pytest.mark.parametrize("model", COUNTS)
def test_only_adapters_are_trained(plays, model):
    (answer,), _ = plays(model, "alone")
    moved = unequal(answer["fresh"], answer["trained"])
    assert moved == [*filter(is_adapter, answer["fresh"])]
    assert len(moved) == 2 * 2 * COUNTS[model]  # A and B, in both layers
    assert answer["losses"] == sorted(answer["losses"], reverse=True)
    assert answer["losses"][0] - answer["losses"][-1] > 0.05


@pytest.mark.parametrize("model", COUNTS)
def test_new_adapters_do_not_change_the_policy(plays, folder, model):
    (answer,), _ = plays(model, "alone")
    engine = engine_of(MODELS[model], folder=folder)
    assert answer["digests"][0] == digests(engine.shards().values())
    assert [*filter(is_adapter, answer["fresh"])] == unequal(answer["fresh"], weights_of(engine))


WO, W1 = ("attention.wo", "weight"), ("feed_forward.w1", "weight")
INNER = "moe.routed_experts.inner_experts"


@pytest.mark.parametrize(
    ("model", "names", "adapted"),
    [
        (TIED_FUSED, ["wo", "w1"], [WO, W1]),
        (EXPERTS, ["experts"], [(INNER, name) for name in ("w1_EFD", "w2_EDF", "w3_EFD")]),
        (CLAMPED, ["experts", "wo"], [WO, (INNER, "gate_up_EDG"), (INNER, "down_EFD")]),
        (EXPERTS, ["wo"], [WO]),
    ],
)
def test_named_layers_are_adapted(folder, model, names, adapted):
    lora = LoRAConverter.Config(rank=2, target_modules=names)
    engine = engine_of(model, folder=folder, lora=lora)
    trained = {name for name, each in engine.model.named_parameters() if each.requires_grad}
    places = itertools.product(range(2), adapted, "ab")
    assert trained == {f"layers.{n}.{layer}.lora_{x}.{weight}" for n, (layer, weight), x in places}


def test_merged_weights_leave_the_device_with_the_model(folder):
    engine = adapted("tied_fused", "alone", folder)
    shards = [shard.tensor for shard in engine.shards().values()]
    held = [resident(shards)]
    engine.offload()
    held.append(resident(shards))
    engine.onload()
    assert held == [resident(shards), 0]


# Every layout.


def test_every_layout_starts_from_the_same_adapters(pair):
    alone, answers, _ = pair
    for answer in answers:
        assert unequal(answer["fresh"], alone["fresh"]) == []


def test_gradients_and_steps_do_not_depend_on_the_layout(pair):
    alone, answers, _ = pair
    for answer in answers:
        assert worst_error(answer["first"]["gradients"], alone["first"]["gradients"]) <= 1e-5
        assert answer["first"]["metrics"][0] == pytest.approx(
            alone["first"]["metrics"][0], rel=1e-5
        )
        assert answer["first"]["step"] == pytest.approx(alone["first"]["step"], rel=1e-5)
        assert len(answer["losses"]) == STEPS
        assert answer["losses"] == pytest.approx(alone["losses"], rel=1e-4)


def test_parts_are_the_merged_weights_from_before_the_first_step_on(pair):
    """Bit for bit where the shapes of products are equal, in tensors that a publisher keeps."""
    alone, answers, _ = pair
    assert alone["merge_error"] == 0.0
    assert all(answer["merge_error"] <= 1e-6 for answer in answers)
    assert [answer["stale_parts"] for answer in [alone, *answers]] == [[]] * (1 + len(answers))
    start, trained = (
        merge_digests(answer["digests"][when] for answer in answers) for when in (0, 1)
    )
    assert start == merge_digests([alone["digests"][0]])
    differing = {name for name in start if start[name] != trained[name]}
    adapters = [name for name in alone["fresh"] if ".lora_a." in name]
    assert differing == {name.replace(".lora_a.", ".") for name in adapters}


def test_a_checkpoint_of_any_layout_resumes_on_one_rank(pair, request, folder):
    _, answers, origin = pair
    shutil.copytree(origin / "checkpoints", Path(folder) / "checkpoints")
    engine = adapted(request.node.callspec.params["pair"][0], "alone", folder)
    engine.shards()
    assert loaded(engine, folder) == {"step": 1}
    assert unequal(answers[0]["trained"], weights_of(engine)) == []
    assert merge_error(engine) == 0.0
    assert learn(engine, ragged_batch(seed=2)) == pytest.approx(answers[0]["next"], rel=1e-5)


# What adapters start from.


def test_a_checkpoint_without_adapters_can_only_be_a_base(folder):
    engine = engine_of(TIED_FUSED, folder=folder)
    learn(engine, ragged_batch())
    source = {"initial_load_path": str(saved(engine, folder, {"step": 1}))}

    other = adapted("tied_fused", "alone", f"{folder}/other")
    fresh = weights_of(other)
    place = f"{folder}/other"
    assert loaded(other, place, **source, initial_load_model_only=True) == {}
    assert digests(other.shards().values()) == digests(engine.shards().values())
    assert not any(map(is_adapter, unequal(fresh, weights_of(other))))
    message = "step-1 was saved without trainer.lora; .* with initial_load_model_only=True"
    with pytest.raises(RunError, match=message):
        loaded(other, place, **source, initial_load_model_only=False)


@pytest.mark.parametrize("model_only", [True, False])
def test_a_checkpoint_with_adapters_needs_a_run_with_adapters(plays, folder, model_only):
    (answer,), origin = plays("tied_fused", "alone")
    source = {
        "initial_load_path": f"{origin}/checkpoints/step-1",
        "initial_load_model_only": model_only,
    }
    engine = adapted("tied_fused", "alone", folder)
    loaded(engine, folder, **source)
    assert digests(engine.shards().values()) == answer["digests"][1]
    with pytest.raises(RunError, match="step-1 was saved with trainer.lora; load it with that"):
        loaded(engine_of(TIED_FUSED, folder=folder), folder, **source)


# Hugging Face and PEFT.


def test_four_ranks_export_merged_weights_and_adapters(plays):
    answers, folder = plays("biased", "fsdp2_tp2")
    exported = tensors_of(folder / "export")
    whole = merged(answers[0]["trained"])
    for layer in range(SIZES["n_layers"]):
        ours = f"layers.{layer}.feed_forward.w2"
        theirs = f"model.layers.{layer}.mlp.down_proj"
        merge = exported[f"{theirs}.weight"]
        torch.testing.assert_close(merge, whole[f"{ours}.weight"], atol=1e-6, rtol=0)
        adapter = tensors_of(folder / "export" / "adapter")
        for x in "ab":
            tensor = adapter[f"base_model.model.{theirs}.lora_{x.upper()}.weight"]
            assert torch.equal(tensor, answers[0]["trained"][f"{ours}.lora_{x}.weight"])
