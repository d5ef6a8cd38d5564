"""Expectations of the estimators over a small vocabulary, computed exactly as sums."""

import pytest
import torch

from rl.algorithms.kl import AdaptiveKL, kl


@pytest.fixture
def policies():
    """Return the logits of a policy and the log-probs of another, float64 [5]."""
    draw = torch.Generator().manual_seed(0)
    logits, other = torch.randn(2, 5, generator=draw, dtype=torch.float64)
    return logits.requires_grad_(), other.log_softmax(0)


def divergence(p, q):
    return (p.exp() * (p - q)).sum()


def test_each_estimator_matches_its_formula():
    logprobs = torch.tensor([-1.0, -2.0])
    reference = torch.tensor([-1.5, -0.5])
    ratio = (reference - logprobs).exp()
    torch.testing.assert_close(kl(logprobs, reference, "k1"), -ratio.log())
    torch.testing.assert_close(kl(logprobs, reference, "k2"), ratio.log() ** 2 / 2)
    torch.testing.assert_close(kl(logprobs, reference, "k3"), ratio - 1 - ratio.log())


@pytest.mark.parametrize(
    ("estimator", "of"),
    [
        ("k1", lambda p, q: 0.0 * p.sum()),
        ("k2", divergence),
        ("k3", lambda p, q: divergence(q, p)),
    ],
)
def test_the_mean_gradient_is_the_documented_one(policies, estimator, of):
    logits, reference = policies
    logprobs = logits.log_softmax(0)
    (gradient,) = torch.autograd.grad(
        (logprobs.exp().detach() * kl(logprobs, reference, estimator)).sum(), logits
    )
    (wanted,) = torch.autograd.grad(of(logits.log_softmax(0), reference), logits)
    torch.testing.assert_close(gradient, wanted)


def test_rate_and_clip_bound_a_step_of_the_coefficient():
    """arXiv:1909.08593, section 2.2: coef (1 + K clip(observed / target - 1, -0.2, 0.2))."""
    steer = AdaptiveKL.Config(target=6.0).build()
    assert steer.update(0.5, 6.0) == 0.5
    assert steer.update(0.5, 6.6) == pytest.approx(0.5 * 1.01)
    assert steer.update(0.5, 60.0) == pytest.approx(0.5 * 1.02)
    steer = AdaptiveKL.Config(target=6.0, rate=0.5, clip=0.4).build()
    assert steer.update(0.5, 60.0) == pytest.approx(0.5 * 1.2)
    assert steer.update(0.5, 0.0) == pytest.approx(0.5 * 0.8)
