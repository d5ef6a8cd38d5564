"""Log-probs and entropies, and the gradients of both, are those of a float64 log_softmax."""

from itertools import accumulate

import numpy as np
import pytest
import torch
from torch.profiler import profile
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from rl.sampling_mask import SamplingMask, encode
from rl.training.logprobs import linear_logprobs
from rl.training.sampling_mask import KeptLogits
from tests.training.ranks import on_ranks
from tests.training.scenes import sharded_logprobs, weigh

TOKENS = 10
WIDTH = 6
VOCABULARY = 13
CHUNKS = [1, 3, 10, 64]


def random_head(dtype=torch.float32, scale=2.0):
    draw = torch.Generator().manual_seed(0)
    hidden = (torch.randn(TOKENS, WIDTH, generator=draw) * scale).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=draw).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(VOCABULARY, (TOKENS,), generator=draw)


def plain(hidden, weight, targets, temperature, weigh=weigh, kept=None):
    """Values and gradients in float64, from logits in the dtype of the weights; over the ids that
    ``kept``, bool [T, V], has.
    """
    hidden = hidden.detach().double().requires_grad_()
    weight = weight.detach().double().requires_grad_()
    logits = hidden @ weight.T / temperature
    if kept is not None:
        logits = logits.masked_fill(~kept, -torch.inf)
    every = torch.log_softmax(logits, -1)
    logprobs = every.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    entropy = -(every.exp() * every.clamp(min=-1e9)).sum(-1)
    weigh(logprobs, entropy).backward()
    return logprobs.detach(), entropy.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_values_and_gradients_are_those_of_log_softmax(temperature, chunk):
    hidden, weight, targets = random_head()
    logprobs, entropy = linear_logprobs(
        hidden, weight, targets, temperature=temperature, chunk_tokens=chunk
    )
    weigh(logprobs, entropy).backward()
    ours = (logprobs.detach(), entropy.detach(), hidden.grad, weight.grad)
    for value, wanted in zip(ours, plain(hidden, weight, targets, temperature), strict=True):
        assert_close(value.double(), wanted, atol=2e-5, rtol=1e-6)


def drawn_sets(targets, words):
    """bool [T, words]: all ids, half of them and the target alone, by turns."""
    kept = torch.rand(len(targets), words, generator=torch.Generator().manual_seed(1)) < 0.5
    kept[::3] = True
    kept[1::3] = False
    kept[torch.arange(len(targets)), targets] = True
    return kept


@pytest.mark.parametrize("chunk", CHUNKS)
def test_values_and_gradients_are_those_of_the_kept_logits(chunk):
    hidden, weight, targets = random_head()
    kept = drawn_sets(targets, VOCABULARY)
    mask = SamplingMask.of_rows(encode(kept))
    assert {*np.sign(mask.sizes)} == {-1, 0, 1}
    values = linear_logprobs(
        hidden,
        weight,
        targets,
        temperature=0.7,
        chunk_tokens=chunk,
        kept=KeptLogits.of(mask, hidden.device),
    )
    weigh(*values).backward()
    ours = (*(value.detach() for value in values), hidden.grad, weight.grad)
    wanted = plain(hidden, weight, targets, 0.7, kept=kept)
    for value, expected in zip(ours, wanted, strict=True):
        assert_close(value.double(), expected, atol=2e-5, rtol=1e-6)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("chunk", [3, 64])
def test_each_value_has_its_own_gradient(which, chunk):
    hidden, weight, targets = random_head()
    linear_logprobs(hidden, weight, targets, chunk_tokens=chunk)[which].sum().backward()
    *_, grad_hidden, grad_weight = plain(
        hidden, weight, targets, 1.0, lambda *values: values[which].sum()
    )
    assert_close(hidden.grad.double(), grad_hidden, atol=1e-5, rtol=1e-6)
    assert_close(weight.grad.double(), grad_weight, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("chunk", [3, 64])
def test_bfloat16_logits_are_taken_in_float32(chunk):
    hidden, weight, targets = random_head(torch.bfloat16)
    logprobs, entropy = linear_logprobs(
        hidden, weight, targets, temperature=0.7, chunk_tokens=chunk
    )
    weigh(logprobs, entropy).backward()
    assert (logprobs.dtype, entropy.dtype) == (torch.float32, torch.float32)
    assert (hidden.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.bfloat16)
    every = torch.log_softmax((hidden @ weight.T).double() / 0.7, -1)
    assert_close(
        logprobs.detach().double(),
        every.gather(-1, targets.unsqueeze(-1)).squeeze(-1),
        atol=3e-6,
        rtol=1e-6,
    )
    *_, grad_hidden, grad_weight = plain(hidden, weight, targets, 0.7)
    for grad, wanted in ((hidden.grad, grad_hidden), (weight.grad, grad_weight)):
        assert (grad.double() - wanted).norm() <= 0.02 * wanted.norm()


def test_certain_tokens_give_finite_values_and_gradients():
    weight = torch.tensor([[1e4], [-1e4], [0.0]], requires_grad=True)
    hidden = torch.tensor([[1.0], [0.5]], requires_grad=True)
    logprobs, entropy = linear_logprobs(hidden, weight, torch.tensor([0, 1]), chunk_tokens=8)
    weigh(logprobs, entropy).backward()
    assert_close(logprobs.detach(), torch.tensor([0.0, -1e4]))
    assert_close(entropy.detach(), torch.zeros(2))
    assert hidden.grad.isfinite().all()
    assert weight.grad.isfinite().all()


@pytest.mark.parametrize("chunk", [3, pytest.param(64, marks=pytest.mark.long)])
def test_a_vocabulary_split_over_ranks_gives_the_same(chunk):
    """13 rows over two ranks: seven and six."""
    hidden, weight, targets = (tensor.detach() for tensor in random_head())
    wanted = plain(hidden, weight, targets, 0.7)
    options = {"temperature": 0.7, "chunk_tokens": chunk}
    for answer in on_ranks(2, sharded_logprobs, hidden, weight, targets, options):
        for value, expected in zip(answer, wanted, strict=True):
            assert_close(value.double(), expected, atol=2e-5, rtol=1e-6)


@pytest.mark.parametrize("chunk", [3, pytest.param(64, marks=pytest.mark.long)])
def test_ranks_keep_their_own_parts_of_the_kept_logits(chunk):
    """83 rows over two ranks: 42 and 41, whose border is within a word of a bitmap."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=draw)
    weight = torch.randn(83, WIDTH, generator=draw)
    targets = torch.randint(83, (TOKENS,), generator=draw)
    kept = drawn_sets(targets, 83)
    kept[1, :3] = True  # a list of three on the first rank
    kept[1, targets[1]] = True
    wanted = plain(hidden, weight, targets, 0.7, kept=kept)
    mask = SamplingMask.of_rows(encode(kept))
    options = {
        "temperature": 0.7,
        "chunk_tokens": chunk,
        "kept": KeptLogits.of(mask, hidden.device),
    }
    for answer in on_ranks(2, sharded_logprobs, hidden, weight, targets, options):
        for value, expected in zip(answer, wanted, strict=True):
            assert_close(value.double(), expected, atol=2e-5, rtol=1e-6)


class Largest(TorchDispatchMode):
    """Remembers the most elements that any operation's result had."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return result


def test_no_more_logits_exist_at_once_than_a_chunk_has():
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(512, 2, generator=draw).requires_grad_()
    weight = torch.randn(1000, 2, generator=draw)
    targets = torch.randint(1000, (512,), generator=draw)
    with Largest() as seen:
        logprobs, entropy = linear_logprobs(hidden, weight, targets, chunk_tokens=16)
        (logprobs + entropy).sum().backward()
    assert 0 < seen.elements <= 16 * 1000


@pytest.mark.parametrize("chunk", [64, 512])
def test_no_more_memory_is_held_than_twice_the_logits_of_a_chunk(chunk):
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(512, 2, generator=draw).requires_grad_()
    weight = torch.randn(5000, 2, generator=draw)
    targets = torch.randint(5000, (512,), generator=draw)
    with profile(profile_memory=True) as seen:
        logprobs, entropy = linear_logprobs(hidden, weight, targets, chunk_tokens=chunk)
        (logprobs + entropy).sum().backward()
    changes = [
        event.nbytes()
        for event in seen.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    logits = 4 * chunk * len(weight)
    assert 1.9 * logits < max(accumulate(changes)) < 2.2 * logits
