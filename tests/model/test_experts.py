"""Each token goes through its own experts, in the precision it comes in; experts without tokens
learn nothing.
"""

import pytest
import torch
import torch.nn.functional as F
from torchtitan.models.common.moe import GroupedExperts

from rl.model.decoder import Experts

COUNTS = {
    "some are idle": (3, 0, 4, 0),
    "all work": (1, 2, 3, 1),
    "one does all": (0, 0, 0, 7),
    "no tokens": (0,) * 4,
}


def experts_of(dtype: torch.dtype) -> Experts:
    torch.manual_seed(0)
    experts = Experts.Config(dim=16, hidden_dim=24, num_experts=4).build()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return experts.to(dtype)


def reference(experts: Experts, x: torch.Tensor, counts: tuple[int, ...]) -> torch.Tensor:
    """One token at a time."""
    owners = [expert for expert, count in enumerate(counts) for _ in range(count)]
    w1, w2, w3 = (w.double() for w in (experts.w1_EFD, experts.w2_EDF, experts.w3_EFD))
    rows = [
        w2[e] @ (F.silu(w1[e] @ token) * (w3[e] @ token))
        for e, token in zip(owners, x.double(), strict=True)
    ]
    return torch.stack(rows) if rows else x.double()


@pytest.mark.parametrize(
    ("dtype", "allowed"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_outputs_and_gradients_are_those_of_each_token_by_itself(counts, dtype, allowed):
    experts = experts_of(dtype)
    x = torch.randn(sum(counts), 16, dtype=dtype, requires_grad=True)
    out = experts(x, torch.tensor(counts))
    wanted = reference(experts, x, counts)
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
