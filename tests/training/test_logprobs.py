"""Log-probs and entropies, and the gradients of both, are those of a float64 log_softmax."""

import pytest
import torch
from torch.testing import assert_close

from rl.training.logprobs import logprobs_and_entropy
from tests.training.ranks import on_ranks
from tests.training.scenes import sharded_logprobs, weigh


def random_logits(dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, 12, generator=draw) * 4
    return logits.to(dtype), torch.randint(12, (2, 5), generator=draw)


def plain(logits, targets, temperature):
    logits = logits.detach().double().requires_grad_()
    every = torch.log_softmax(logits / temperature, -1)
    logprobs, entropy = every.gather(-1, targets.unsqueeze(-1)).squeeze(-1), -(every.exp() * every).sum(-1)
    weigh(logprobs, entropy).backward()
    return logprobs.detach(), entropy.detach(), logits.grad


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
def test_values_and_gradients_are_those_of_log_softmax(temperature):
    logits, targets = random_logits()
    logits.requires_grad_()
    logprobs, entropy = logprobs_and_entropy(logits, targets, temperature=temperature)
    weigh(logprobs, entropy).backward()
    for value, wanted in zip(
        (logprobs.detach(), entropy.detach(), logits.grad), plain(logits, targets, temperature), strict=True
    ):
        assert_close(value.double(), wanted, atol=3e-6, rtol=1e-6)


@pytest.mark.parametrize("which", [0, 1])
def test_each_value_has_its_own_gradient(which):
    logits, targets = random_logits()
    ours, theirs = logits.clone().requires_grad_(), logits.double().requires_grad_()
    logprobs_and_entropy(ours, targets)[which].sum().backward()
    every = torch.log_softmax(theirs, -1)
    value = [every.gather(-1, targets.unsqueeze(-1)), -(every.exp() * every)][which]
    value.sum().backward()
    assert_close(ours.grad.double(), theirs.grad, atol=1e-6, rtol=1e-6)


def test_bfloat16_logits_are_taken_in_float32():
    logits, targets = random_logits(torch.bfloat16)
    logits.requires_grad_()
    logprobs, entropy = logprobs_and_entropy(logits, targets, temperature=0.7)
    weigh(logprobs, entropy).backward()
    wanted = plain(logits, targets, 0.7)
    assert (logprobs.dtype, entropy.dtype, logits.grad.dtype) == (torch.float32, torch.float32, torch.bfloat16)
    assert_close(logprobs.detach().double(), wanted[0], atol=3e-6, rtol=1e-6)
    assert_close(logits.grad.double(), wanted[2], atol=1e-3, rtol=1e-2)


def test_certain_tokens_give_finite_values_and_gradients():
    logits = torch.tensor([[[1e4, -1e4, 0.0], [0.0, 0.0, -1e4]]]).requires_grad_()
    logprobs, entropy = logprobs_and_entropy(logits, torch.tensor([[0, 2]]))
    weigh(logprobs, entropy).backward()
    assert_close(logprobs.detach(), torch.tensor([[0.0, -1e4 - 0.6931472]]))
    assert_close(entropy.detach(), torch.tensor([[0.0, 0.6931472]]))
    assert logits.grad.isfinite().all()


def test_a_vocabulary_split_over_ranks_gives_the_same():
    logits, targets = random_logits()
    wanted = plain(logits, targets, 0.7)
    for answer in on_ranks(2, sharded_logprobs, logits, targets, 0.7):
        for value, expected in zip(answer, wanted, strict=True):
            assert_close(value.double(), expected, atol=3e-6, rtol=1e-6)
