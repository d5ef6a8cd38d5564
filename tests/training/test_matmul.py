"""Kernels of matrix products: the same numbers for every shape, stride and dtype, and their
gradients; the choice of the faster one.
"""

import os
import time

import pytest
import torch

from rl.training import matmul
from rl.training.matmul import faster_kernel, use_kernel
from tests.training.ranks import on_ranks

SHAPES = [(1, 1, 1), (3, 5, 7), (64, 48, 33), (200, 16, 24), (0, 4, 3), (4, 0, 3)]


def test_products_agree_with_double_precision_however_the_matrices_lie():
    ((before, after, again, kernels, others),) = on_ranks(1, worst_errors)
    assert "mkldnn::_linear_pointwise" not in before | again
    assert "mkldnn::_linear_pointwise" in after
    assert kernels < 1e-6
    assert others == 0


@pytest.mark.parametrize(("slow", "chosen"), [("_mkl", "onednn"), ("_onednn", "mkl")])
def test_the_faster_kernel_is_chosen(slow, chosen, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(matmul, slow, slowed(getattr(matmul, slow)))
    assert faster_kernel() == chosen


def test_all_runs_on_a_host_have_the_choice_of_the_first(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with monkeypatch.context() as first:
        first.setattr(matmul, "_mkl", slowed(matmul._mkl))
        assert faster_kernel() == "onednn"
    monkeypatch.setattr(matmul, "_onednn", slowed(matmul._onednn))
    assert faster_kernel() == "onednn"


def test_a_process_that_measured_at_the_same_time_takes_the_stored_choice(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def measured_elsewhere_too():
        monkeypatch.setattr(matmul, "kernel_seconds", lambda: {"mkl": 2.0, "onednn": 1.0})
        assert faster_kernel() == "onednn"
        return {"mkl": 1.0, "onednn": 1.0}

    monkeypatch.setattr(matmul, "kernel_seconds", measured_elsewhere_too)
    assert faster_kernel() == "onednn"


@pytest.mark.parametrize("cache", ["/dev/null", "/" + "x" * 300])
def test_a_cache_that_cannot_be_used_leaves_the_measured_choice(cache, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    monkeypatch.setattr(matmul, "_mkl", slowed(matmul._mkl))
    assert faster_kernel() == "onednn"


def test_a_user_without_a_home_has_the_measured_choice(monkeypatch):
    def unknown(_user):
        raise KeyError

    for variable in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setattr(matmul, "_mkl", slowed(matmul._mkl))
    assert faster_kernel() == "onednn"


def test_every_rank_has_the_choice_of_the_first(tmp_path):
    assert on_ranks(2, choice_of_a_rank, str(tmp_path)) == ["onednn", "onednn"]


def slowed(multiply):
    """Return the kernel with milliseconds of work before each product."""

    def slower(a, b):
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass
        return multiply(a, b)

    return slower


# Run on a rank.


def choice_of_a_rank(cache: str) -> str:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    os.environ["XDG_CACHE_HOME"] = f"{cache}/{rank}"
    slow = "_mkl" if rank == 0 else "_onednn"
    setattr(matmul, slow, slowed(getattr(matmul, slow)))
    return faster_kernel()


def worst_errors() -> tuple[set[str], set[str], set[str], float, float]:
    """Return operations of a product before oneDNN, with it and after it, its errors in float32,
    and changes of other products.
    """
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
    """Products of each shape with matrices that lie by rows and by columns, with gradients, and
    into a given result.
    """
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
