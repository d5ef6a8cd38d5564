"""The table covers every parameter of every form of the model, and its boxes tile each of them."""

import pytest
import torch

from rl.errors import ConfigError
from rl.model.parts import Box
from rl.model.qwen3 import qwen3_config
from rl.model.shape import ModelConfig, shape_of
from rl.model.tp_plan import Cut, check_divides, cut_of, local_box, local_part
from rl.training.attention import DenseAttention

SIZES = {"vocab_size": 24, "dim": 16, "n_heads": 8, "n_kv_heads": 4, "head_dim": 4, "hidden_dim": 40}


EXPERTS = {"num_experts": 3, "experts_per_token": 2, "moe_hidden_dim": 12}


def parameters(tied: bool, fused: bool, experts: bool) -> dict[str, torch.Tensor]:
    config = ModelConfig(**SIZES, tie_embeddings=tied, fuse_qkv=fused, **(EXPERTS if experts else {}))
    with torch.device("meta"):
        model = qwen3_config(shape_of(config), fuse_qkv=fused, inner_attention=DenseAttention.Config()).build()
    return dict(model.named_parameters())


FORMS = pytest.mark.parametrize(
    ("tied", "fused", "experts"),
    [(True, True, False), (True, False, False), (False, True, False), (False, False, False), (True, True, True)],
)


@FORMS
def test_every_parameter_has_one_line_and_weights_that_are_cut_are_large(tied, fused, experts):
    cuts = {name: cut_of(name) for name in parameters(tied, fused, experts)}
    replicated = {name for name, cut in cuts.items() if cut is Cut.REPLICATED}
    assert replicated == {name for name in cuts if "norm" in name or "router" in name}
    assert any("experts" in name for name in cuts) == experts
    assert ("lm_head.weight" in cuts) == (not tied)
    assert any(name.endswith("wqkv.weight") for name in cuts) == fused


@FORMS
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_boxes_of_all_ranks_tile_each_parameter(tied, fused, experts, tp):
    for name, parameter in parameters(tied, fused, experts).items():
        shape = tuple(parameter.shape)
        covered = torch.zeros(shape, dtype=torch.int)
        for rank in range(tp):
            box = local_box(name, shape, tp=tp, rank=rank)
            covered[box.slices_in(Box.whole(shape))] += 1
            assert local_part(name, torch.empty(box.shape, device="meta"), tp=tp, rank=rank).region == (
                name,
                shape,
                box,
            )
        times = tp if cut_of(name) is Cut.REPLICATED else 1
        assert (covered == times).all(), name


@pytest.mark.parametrize(
    "name", ["layers.0.attention.wo.bias", "layers.0.moe.shared_experts.w1.weight", "norms.weight", ""]
)
def test_a_parameter_without_a_line_is_named(name):
    with pytest.raises(KeyError, match=f"no line for parameter '{name}'"):
        cut_of(name)


def test_a_cut_that_does_not_come_out_even_is_refused():
    with pytest.raises(ValueError, match=r"layers.0.attention.wo.weight: dimension 1 of \(16, 30\) .* 4 equal parts"):
        local_box("layers.0.attention.wo.weight", (16, 30), tp=4, rank=0)


@pytest.mark.parametrize("degree", [0, 3, 8, -1])
def test_degrees_that_do_not_divide_the_model_are_refused_with_those_that_do(degree):
    shape = shape_of(ModelConfig(**SIZES))
    for allowed in (1, 2, 4):
        check_divides("some.field", allowed, shape)
    sizes = "n_heads=8, n_kv_heads=4, vocab_size=24, hidden_dim=40"
    with pytest.raises(ConfigError, match=rf"some.field is {degree}; .*{sizes}: allowed are \[1, 2, 4\]"):
        check_divides("some.field", degree, shape)


def test_of_a_mixture_the_experts_width_is_cut():
    shape = shape_of(ModelConfig(**SIZES, **EXPERTS | {"moe_hidden_dim": 6}))
    with pytest.raises(ConfigError, match=r"some.field is 4; .*moe_hidden_dim=6: allowed are \[1, 2\]"):
        check_divides("some.field", 4, shape)
