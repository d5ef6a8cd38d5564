"""Linear layers in float8, emulated here: the same in every layout, and not the output head."""

from dataclasses import replace
from functools import partial

import pytest
from torchtitan.components.quantization import Float8Linear, Float8LinearConverter

from tests.kit.layouts import Layout
from tests.kit.ranks import on_ranks
from tests.kit.reference import relative_error, worst_error
from tests.kit.scenes import EXPERTS, TIED_FUSED, engine_of, held
from tests.kit.tables import cases

FLOAT8 = Float8LinearConverter.Config(emulate=True)
IN_FLOAT8 = {"float8": FLOAT8, "micro_batch_size": 1}
# float8 takes layers whose sizes are multiples of 16 and leaves the others as they are.
DENSE = replace(TIED_FUSED, hidden_dim=64, vocab_size=32)
MIXED = replace(EXPERTS, num_experts=16, vocab_size=32)
LAYOUTS = {"fsdp2": Layout(shard=2), "tp2": Layout(tp=2), "fsdp2_tp2": Layout(shard=2, tp=2)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory, lone_rank):
    """Return the results of one rank for rows one by one, in float8."""
    return held(DENSE, Layout(), str(tmp_path_factory.mktemp("alone")), **IN_FLOAT8)


def test_float8_is_on(alone, folder):
    exact = held(DENSE, Layout(), folder, micro_batch_size=1)
    assert alone["digests"] == exact["digests"]
    assert 0.02 < relative_error(alone["gradients"], exact["gradients"]) < 0.5
    assert alone["metrics"][0]["loss/mean"] == pytest.approx(
        exact["metrics"][0]["loss/mean"], abs=0.02
    )


@pytest.mark.parametrize("name", cases(LAYOUTS, ["tp2"]))
def test_gradients_do_not_depend_on_the_layout(alone, folder, name):
    """Compare rows one by one: rows of one micro-batch share the scale of their activations."""
    layout = LAYOUTS[name]
    for answer in on_ranks(layout.ranks, partial(held, **IN_FLOAT8), DENSE, layout, folder):
        assert worst_error(answer["gradients"], alone["gradients"]) <= 1e-5


DENSE_LAYERS = {"feed_forward.w1", "feed_forward.w2", "feed_forward.w3"}
ATTENTION_LAYERS = {"attention.qkv_linear.wqkv", "attention.wo"}


@pytest.mark.parametrize(
    ("model", "excluded", "layers"),
    [
        (DENSE, [], ATTENTION_LAYERS | DENSE_LAYERS),
        (MIXED, [], ATTENTION_LAYERS),
        (DENSE, ["attention"], DENSE_LAYERS),
    ],
)
def test_linear_layers_are_converted_except_for_head_router_and_those_excluded(
    model, excluded, layers, folder
):
    engine = engine_of(model, folder=folder, float8=replace(FLOAT8, filter_fqns=excluded))
    modules = engine.model.named_modules()
    converted = {name for name, module in modules if isinstance(module, Float8Linear)}
    assert converted == {f"layers.{index}.{name}" for index in range(2) for name in layers}
