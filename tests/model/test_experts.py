"""Each token goes through its own experts, in the precision it comes in; experts without tokens
learn nothing.
"""

import pytest
import torch
import torch.nn.functional as F
from torchtitan.models.common.moe import GroupedExperts

from rl.model.experts import ClampedExperts, Experts

COUNTS = {
    "some are idle": (3, 0, 4, 0),
    "all work": (1, 2, 3, 1),
    "one does all": (0, 0, 0, 7),
    "no tokens": (0,) * 4,
}


SIZES = {"dim": 16, "hidden_dim": 24, "num_experts": 4}


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
