"""Each token goes through its own experts, in its precision; unused experts learn nothing."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

from rl.generation.expert_records import keep_choices
from rl.model.decoder import decoder_config
from rl.model.experts import ClampedExperts, Experts, OwnExperts
from rl.model.shape import ModelConfig, shape_of

COUNTS = {
    "some are idle": (3, 0, 4, 0),
    "all work": (1, 2, 3, 1),
    "one does all": (0, 0, 0, 7),
    "no tokens": (0,) * 4,
}


SIZES = {"dim": 16, "hidden_dim": 24, "num_experts": 4}
TOP_2 = {"num_experts": 4, "top_k": 2}
MODEL = ModelConfig(
    dim=64, n_layers=2, num_experts=4, experts_per_token=2, moe_hidden_dim=32, max_seq_len=64
)


def experts_of(dtype: torch.dtype, *, clamped: bool = False) -> torch.nn.Module:
    torch.manual_seed(0)
    config = ClampedExperts.Config(slope=1.5, bound=2.0, **SIZES) if clamped else None
    experts = (config or Experts.Config(**SIZES)).build()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return experts.to(dtype)


def reference(
    experts: torch.nn.Module, x: torch.Tensor, counts: tuple[int, ...], *, clamped: bool
) -> torch.Tensor:
    """One token at a time."""
    owners = [expert for expert, count in enumerate(counts) for _ in range(count)]
    parameters = [each.double() for each in experts.parameters()]

    def output(expert: int, token: torch.Tensor) -> torch.Tensor:
        weights = [each[expert] for each in parameters]
        if clamped:
            into, bias, out, added = weights
            gate, up = (token @ into + bias).view(-1, 2).unbind(1)
            gate = torch.minimum(gate, gate.new_tensor(2.0))
            up = torch.maximum(torch.minimum(up, up.new_tensor(2.0)), up.new_tensor(-2.0))
            return (gate * (1.5 * gate).sigmoid() * (up + 1)) @ out + added
        w1, w2, w3 = weights
        return w2 @ (F.silu(w1 @ token) * (w3 @ token))

    rows = [output(e, token) for e, token in zip(owners, x.double(), strict=True)]
    return torch.stack(rows) if rows else x.double()


@pytest.mark.parametrize(
    ("dtype", "allowed"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("clamped", [False, True], ids=["plain", "clamped"])
def test_outputs_and_gradients_are_those_of_each_token_by_itself(counts, dtype, allowed, clamped):
    experts = experts_of(dtype, clamped=clamped)
    x = torch.randn(sum(counts), 16, dtype=dtype, requires_grad=True)
    out = experts(x, torch.tensor(counts))
    wanted = reference(experts, x, counts, clamped=clamped)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), wanted, rtol=allowed, atol=10 * allowed)

    inputs = [x, *experts.parameters()]
    gradients = torch.autograd.grad(out.double().pow(2).sum(), inputs)
    expected_gradients = torch.autograd.grad(wanted.pow(2).sum(), inputs, materialize_grads=True)
    for gradient, expected in zip(gradients, expected_gradients, strict=True):
        assert (gradient - expected).norm() <= 5 * allowed * expected.norm()
    for expert, count in enumerate(counts):
        assert all(bool(gradient[expert].any()) == (count > 0) for gradient in gradients[1:])


def test_bfloat16_outputs_equal_torchtitans():
    experts = experts_of(torch.bfloat16)
    x = torch.randn(7, 16).bfloat16()
    counts = torch.tensor([3, 0, 4, 0])
    torch.testing.assert_close(experts(x, counts), GroupedExperts.forward(experts, x, counts))


@pytest.mark.parametrize("clamped", [False, True], ids=["plain", "clamped"])
@pytest.mark.parametrize("idle", [(), (0, 1), (1, 2, 3)])
def test_ranks_that_compute_their_own_experts_add_up_to_all_of_them(clamped, idle, monkeypatch):
    """Grouped products, here on a CPU."""
    whole = experts_of(torch.bfloat16, clamped=clamped)
    x = torch.randn(9, 16).bfloat16()
    likes = torch.rand(9, 4)
    likes[:, idle] -= 9.0
    weights, ids = likes.softmax(1).topk(2)
    routing = (weights, ids, ids.flatten().bincount(minlength=4))

    def output(experts: torch.nn.Module, dispatcher: LocalTokenDispatcher) -> torch.Tensor:
        rows, counts, metadata = dispatcher.dispatch(x, *routing)
        computed = experts(rows, counts)
        computed[counts.sum() :] = torch.nan  # undefined on CUDA
        return dispatcher.combine(computed, metadata, x)

    with torch.no_grad():
        wanted = output(whole, LocalTokenDispatcher(LocalTokenDispatcher.Config(**TOP_2)))
        monkeypatch.setattr("rl.model.experts.is_grouped", lambda x: True)
        ranks = [OwnExperts(shape_of(MODEL), ranks=2, rank=rank) for rank in range(2)]
        parts = [output(part_of(whole, each.own), each) for each in ranks]
    torch.testing.assert_close(sum(parts), wanted, rtol=2e-2, atol=5e-2)


def part_of(experts: torch.nn.Module, own: slice) -> torch.nn.Module:
    """A copy of the module with ``own`` of the experts."""
    parts = {name: torch.nn.Parameter(each[own]) for name, each in experts.named_parameters()}
    experts = copy.copy(experts)
    experts._parameters = parts
    return experts


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", [MODEL.family, "gpt_oss"])
def test_grouped_products_and_records_ask_a_device_for_no_number(family, ranks, monkeypatch):
    """Graphs can capture them. Other products cannot be computed without numbers."""
    shape = shape_of(replace(MODEL, family=family))
    attention = ScaledDotProductAttention.Config()
    model = decoder_config(shape, fuse_qkv=True, inner_attention=attention).build().bfloat16()
    keep_choices(model, shape, tokens=32)
    for layer in model.layers.values():
        routed = layer.moe.routed_experts
        if ranks == 2:
            routed.token_dispatcher = OwnExperts(shape, ranks=2, rank=1)
            routed.inner_experts = part_of(routed.inner_experts, routed.token_dispatcher.own)
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            x = torch.randn(1, 24, 64, dtype=torch.bfloat16)
            with monkeypatch.context() as patched:
                patched.setattr("rl.model.experts.is_grouped", lambda x: True)
                assert layer.moe(x).shape == x.shape
            with pytest.raises(DataDependentOutputException):
                layer.moe(x)
