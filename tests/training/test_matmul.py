"""Kernels of matrix products have the same numbers for every shape, stride and dtype."""

import torch

from rl.training.matmul import use_kernel
from tests.kit.ranks import on_ranks

SHAPES = [(1, 1, 1), (3, 5, 7), (64, 48, 33), (200, 16, 24), (0, 4, 3), (4, 0, 3)]


def test_products_agree_with_double_precision_however_the_matrices_lie():
    ((before, after, again, kernels, others),) = on_ranks(1, worst_errors)
    assert "mkldnn::_linear_pointwise" not in before | again
    assert "mkldnn::_linear_pointwise" in after
    assert kernels < 1e-6
    assert others == 0


# Run on a rank.


def worst_errors() -> tuple[set[str], set[str], set[str], float, float]:
    """Return operations before, with and after oneDNN, its errors, and other changes."""
    before = operations()
    exact = product(torch.float64)
    coarse = product(torch.bfloat16)
    use_kernel("onednn")
    use_kernel("onednn")  # once more changes nothing
    errors = [distance(got, want) for got, want in zip(product(torch.float32), exact, strict=True)]
    again = zip(product(torch.float64) + product(torch.bfloat16), exact + coarse, strict=True)
    changes = [distance(got, want) for got, want in again]
    during = operations()
    use_kernel("mkl")
    return before, during, operations(), max(errors), max(changes)


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape
    return float((got - want).norm() / want.norm()) if want.any() else float(got.any())


def operations() -> set[str]:
    with torch.profiler.profile() as profile:
        torch.randn(8, 8) @ torch.randn(8, 8)
    return {event.key for event in profile.key_averages()}


def product(dtype: torch.dtype) -> list[torch.Tensor]:
    """Products of each shape, with matrices by rows and by columns, and gradients."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for rows, inner, columns in SHAPES:
        a = torch.randn(rows, inner, generator=draw).to(dtype)
        b = torch.randn(inner, columns, generator=draw).to(dtype)
        for left in (a, a.T.contiguous().T):
            for right in (b, b.T.contiguous().T):
                x = left.clone().requires_grad_()
                y = right.clone().requires_grad_()
                result = x @ y
                result.backward(torch.ones_like(result))
                found += [
                    result.detach(),
                    x.grad,
                    y.grad,
                    torch.mm(left, right, out=result.detach().clone()),
                ]
    return found
