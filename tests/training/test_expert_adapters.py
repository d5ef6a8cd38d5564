"""Adapters of experts have the gradient of the weights that they are merged into."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.config import CompileConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from rl.model.expert_adapters import groups_of, low_rank
from rl.training.sharded_model import is_adapter
from tests.kit.batches import ragged_batch
from tests.kit.ranks import in_layout
from tests.kit.reference import loss_sum, of_scene, relative_error, worst_error
from tests.kit.scenes import (
    CUTS,
    KINDS,
    TEMPERATURE,
    accumulate,
    cut_by,
    gradients_of,
    unequal,
    weights_of,
)
from tests.kit.tables import long
from tests.training.test_adapters import WHOLE, checkpointer_of, play_states, trained
from tests.training.test_adapters import adapted as several
from tests.training.test_lora import adapted, merged, wake

MIXTURES = ("experts", "clamped", "few_clamped")


@pytest.mark.parametrize("model", MIXTURES)
def test_adapters_have_the_gradient_of_merged_weights_in_float64(folder, model):
    options = {} if model == "experts" else {"windows": (8, 0), "eps": 1e-5}
    engine = adapted(model, "alone", folder)
    wake(engine, 0.05)
    for cut in KINDS if model == "experts" else KINDS[-2:]:
        weights = {name: each.double() for name, each in weights_of(engine).items()}
        factors = {name: weights[name].requires_grad_() for name in filter(is_adapter, weights)}
        reference = of_scene(merged(weights), **options)
        batches = [replace(each, experts=None) for each in CUTS[cut].batches]
        loss = CUTS[cut].loss
        sum(loss_sum(reference, each, loss, temperature=TEMPERATURE) for each in batches).backward()
        wanted = {name: factor.grad for name, factor in factors.items()}
        cut_by(engine, **CUTS[cut].fields)
        for batch in batches:
            engine.forward_backward(batch, loss.build(), temperature=TEMPERATURE)
        gradients = gradients_of(engine)
        engine.optimizers.zero_grad()
        assert relative_error(gradients, wanted) <= 1e-6, cut
        assert worst_error(gradients, wanted) <= 4e-6, cut


COMPUTE = {
    "full AC": ("alone", {"activation_checkpoint": FullAC.Config()}),
    "selective AC": ("alone", {"activation_checkpoint": SelectiveAC.Config()}),
    "compile": ("ep2", {"compile": CompileConfig(enable=True, backend="aot_eager")}),
}


def play_gradient(model: str, layout: str, folder: str, trainer: dict[str, Any]) -> Any:
    engine = adapted(model, layout, folder, **trainer)
    wake(engine)
    gradients = accumulate(engine, ragged_batch())["gradients"]
    return {canonical_fqn(name): gradient for name, gradient in gradients.items()}


CASES = [
    ("experts", "full AC"),
    long("experts", "selective AC"),
    long("clamped", "full AC"),
    long("experts", "compile"),
]


@pytest.mark.parametrize(("model", "name"), CASES)
def test_recomputed_and_compiled_adapters_have_the_same_gradient(folder, model, name):
    layout, trainer = COMPUTE[name]
    wanted = play_gradient(model, "alone", folder, {})
    for gradients in in_layout(play_gradient, model, layout, folder, trainer):
        assert worst_error(gradients, wanted) <= 1e-5


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("experts", "alone"),
        long("experts", "tp2"),
        long("clamped", "fsdp2_tp2_ep2"),
    ],
)
def test_states_and_snapshots_of_any_layout_are_read_on_one_rank(once, folder, model, layout):
    answers, origin = once(play_states, model, layout)
    engine = several(layout="alone", folder=folder, model=model)
    checkpointer = checkpointer_of(engine, folder)
    for source in ("state", "snapshot"):
        engine.adapters.create(source, WHOLE)
        engine.adapters.use(source)
        checkpointer.load_state(Path(origin) / source, source == "state")
        assert unequal(trained(engine, source), answers[0]["weights"]) == []
    checkpointer.close()


def test_grouped_products_of_cuda_add_what_plain_products_add():
    """CPU has the forward pass of both. The rank is filled up for the former."""
    generator = torch.Generator().manual_seed(0)
    x, a, b = (
        torch.randn(shape, generator=generator).bfloat16()
        for shape in ((11, 16), (3, 16, 4), (3, 24, 4))
    )
    named = [SimpleNamespace(w=factor) for factor in (a, b)]
    experts = SimpleNamespace(lora_a=named[0], lora_b=named[1], _lora_scaling=0.5)
    counts = torch.tensor([5, 0, 6])
    plain = low_rank(experts, "w", x, groups_of(x, counts))
    grouped = low_rank(experts, "w", x, counts.cumsum(0, dtype=torch.int32))
    torch.testing.assert_close(grouped, plain, rtol=0.02, atol=0.02)
