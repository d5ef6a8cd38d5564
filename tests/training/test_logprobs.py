"""Log-probs and entropies, and the gradients of both, are those of a float64 log_softmax."""

from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import profile
from torch.testing import assert_close

from rl.model.decoder import float32_logits
from rl.training.kept_logits import KeptLogits
from rl.training.logprobs import linear_logprobs, rounded_logits
from rl.types.sampling_mask import SamplingMask, encode
from tests.kit.batches import ragged_batch
from tests.kit.ranks import on_ranks
from tests.kit.scenes import TIED_FUSED, engine_of
from tests.kit.tables import long

TOKENS = 10
WIDTH = 6
VOCABULARY = 13
CHUNKS = [1, 3, 10, 64]


def random_head(dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    hidden = (torch.randn(TOKENS, WIDTH, generator=draw) * 2).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=draw).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(VOCABULARY, (TOKENS,), generator=draw)


def weigh(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
    """A sum in which each token's log-prob and entropy has a gradient of its own."""
    place = torch.arange(logprobs.numel()).view(logprobs.shape) + 1.0
    return (logprobs * place.sin() + entropy * place.cos()).sum()


def sharded_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, options: dict
) -> list[torch.Tensor]:
    """Log-probs, entropy and whole gradients of both, with weights split over the vocabulary."""
    init_device_mesh("cpu", (2,))
    mine = weight.chunk(2)[dist.get_rank()].requires_grad_()
    hidden.requires_grad_()
    values = linear_logprobs(
        hidden, mine, targets, vocab_size=len(weight), group=dist.group.WORLD, **options
    )
    weigh(*values).backward()
    dist.all_reduce(hidden.grad)
    shards = [None, None]
    dist.all_gather_object(shards, mine.grad)
    dist.destroy_process_group()
    return [value.detach() for value in values] + [hidden.grad, torch.cat(shards)]


@pytest.mark.parametrize("chunk_tokens", [3, 64])
@pytest.mark.parametrize("has_adapter", [False, True])
def test_logits_of_a_float32_head_are_not_rounded(chunk_tokens, has_adapter):
    hidden, weight, targets = random_head(torch.bfloat16)
    low_rank = (hidden[:, :2].detach(), weight[:, :2].detach()) if has_adapter else None

    def error(product):
        given = {"chunk_tokens": chunk_tokens, "low_rank": low_rank, "product": product}
        logprobs, _ = linear_logprobs(hidden, weight, targets, **given)
        logits = hidden.double() @ weight.double().T
        if low_rank is not None:
            logits += low_rank[0].double() @ low_rank[1].double().T
        wanted = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        gradients = [torch.autograd.grad(x.sum(), (hidden, weight)) for x in (logprobs, wanted)]
        for own, other in zip(*gradients, strict=True):
            assert_close(own, other, atol=0.1, rtol=0.1)
        return (logprobs - wanted).abs().max().item()

    assert error(float32_logits) < 1e-5
    assert error(rounded_logits) > 1e-3


@pytest.mark.parametrize("tie", [False, True])
def test_a_trainer_in_bfloat16_with_a_float32_head_rounds_no_logits(tmp_path, tie):
    model = replace(TIED_FUSED, float32_head=True, tie_embeddings=tie)
    engine = engine_of(model, folder=str(tmp_path), dtype="bfloat16")
    batch = ragged_batch()
    hidden: list[torch.Tensor] = []
    engine.config.micro_batch_size = len(batch.lengths)
    engine.model.norm.register_forward_hook(lambda _module, _args, out: hidden.append(out))
    engine.model.lm_head.register_forward_hook(
        lambda head, args, out: hidden.append((args[1], head.weight.detach().clone(), out[0]))
    )
    engine.forward(batch)
    states, (targets, weight, found) = hidden[:2]
    assert states.dtype == weight.dtype == torch.bfloat16
    logits = states.float() @ weight.float().T
    wanted = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    assert (found - wanted)[targets >= 0].abs().max() < 1e-5


def plain(hidden, weight, targets, temperature, weigh=weigh, kept=None, cap=0.0):
    """Values and gradients in float64, from logits in the dtype of the weights; over the ids that
    ``kept``, bool [T, V], has. A ``cap`` bounds the logits.
    """
    hidden = hidden.detach().double().requires_grad_()
    weight = weight.detach().double().requires_grad_()
    logits = hidden @ weight.T
    logits = (cap * torch.tanh(logits / cap) if cap else logits) / temperature
    if kept is not None:
        logits = logits.masked_fill(~kept, -torch.inf)
    every = torch.log_softmax(logits, -1)
    logprobs = every.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    entropy = -(every.exp() * every.clamp(min=-1e9)).sum(-1)
    weigh(logprobs, entropy).backward()
    return logprobs.detach(), entropy.detach(), hidden.grad, weight.grad


def drawn_sets(targets, words):
    """bool [T, words]: all ids, half of them and the target alone, by turns."""
    kept = torch.rand(len(targets), words, generator=torch.Generator().manual_seed(1)) < 0.5
    kept[::3] = True
    kept[1::3] = False
    kept[torch.arange(len(targets)), targets] = True
    return kept


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_values_and_gradients_are_those_of_log_softmax(temperature, chunk, masked, cap):
    hidden, weight, targets = random_head()
    kept = drawn_sets(targets, VOCABULARY) if masked else None
    values = linear_logprobs(
        hidden,
        weight,
        targets,
        temperature=temperature,
        cap=cap,
        chunk_tokens=chunk,
        kept=kept_logits(kept),
    )
    weigh(*values).backward()
    ours = (*(value.detach() for value in values), hidden.grad, weight.grad)
    wanted = plain(hidden, weight, targets, temperature, kept=kept, cap=cap)
    for value, expected in zip(ours, wanted, strict=True):
        assert_close(value.double(), expected, atol=2e-5, rtol=1e-6)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_targets_of_a_token_have_log_probs_and_gradients_of_their_own(chunk):
    hidden, weight, _ = random_head()
    targets = torch.randint(-1, VOCABULARY, (2, TOKENS // 2, 4), generator=torch.manual_seed(3))
    targets[..., 3] = targets[..., 0]
    rows = hidden.view(2, TOKENS // 2, WIDTH)
    logprobs, entropy = linear_logprobs(rows, weight, targets, chunk_tokens=chunk)
    scale = torch.randn(targets.shape)
    ((logprobs * scale).sum() + entropy.square().sum()).backward()
    exact, head = (each.detach().double().requires_grad_() for each in (rows, weight))
    every = torch.log_softmax(exact @ head.T, -1)
    wanted = every.gather(-1, targets.clamp(min=0)).masked_fill(targets < 0, 0.0)
    spread = -(every.exp() * every).sum(-1)
    ((wanted * scale).sum() + spread.square().sum()).backward()
    assert (targets < 0).any() and logprobs[targets < 0].eq(0).all()
    assert_close(logprobs.double(), wanted, atol=2e-5, rtol=1e-6)
    assert_close(entropy.double(), spread, atol=2e-5, rtol=1e-6)
    assert_close(hidden.grad.double(), exact.grad.view(hidden.shape), atol=1e-4, rtol=1e-5)
    assert_close(weight.grad.double(), head.grad, atol=1e-4, rtol=1e-5)


def kept_logits(kept):
    """Logits of ``kept``, bool [T, V], as lists, bitmaps and whole rows; None for all."""
    if kept is None:
        return None
    mask = SamplingMask.of_rows(encode(kept))
    assert {*np.sign(mask.sizes)} == {-1, 0, 1}
    return KeptLogits.of(mask, torch.device("cpu"))


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
def test_an_adapter_adds_its_product_to_the_logits_and_has_gradients(chunk):
    """As more columns of the hidden states and of the weight, which is frozen."""
    hidden, weight, targets = random_head()
    draw = torch.Generator().manual_seed(3)
    low = torch.randn(TOKENS, 2, generator=draw).requires_grad_()
    up = torch.randn(VOCABULARY, 2, generator=draw).requires_grad_()
    frozen = weight.detach()
    values = linear_logprobs(
        hidden, frozen, targets, temperature=0.7, chunk_tokens=chunk, low_rank=(low, up)
    )
    weigh(*values).backward()
    whole = (torch.cat([hidden, low], dim=1), torch.cat([frozen, up], dim=1))
    *wanted, by_hidden, by_weight = plain(*whole, targets, 0.7)
    wanted += [*by_hidden.split([WIDTH, 2], dim=1), by_weight[:, WIDTH:]]
    ours = (*(value.detach() for value in values), hidden.grad, low.grad, up.grad)
    for value, expected in zip(ours, wanted, strict=True):
        assert_close(value.double(), expected, atol=2e-5, rtol=1e-6)


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


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("chunk", [3, long(64)])
def test_a_vocabulary_split_over_ranks_gives_the_same(chunk, masked):
    """83 rows over two ranks: 42 and 41, whose border is within a word of a bitmap."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=draw)
    weight = torch.randn(83, WIDTH, generator=draw)
    targets = torch.randint(83, (TOKENS,), generator=draw)
    kept = None
    if masked:
        kept = drawn_sets(targets, 83)
        kept[1, :3] = True  # a list of three on the first rank
    wanted = plain(hidden, weight, targets, 0.7, kept=kept)
    options = {"temperature": 0.7, "chunk_tokens": chunk, "kept": kept_logits(kept)}
    for answer in on_ranks(2, sharded_logprobs, hidden, weight, targets, options):
        for value, expected in zip(answer, wanted, strict=True):
            assert_close(value.double(), expected, atol=2e-5, rtol=1e-6)


def test_ranks_with_parts_of_a_float32_head_round_no_logits():
    hidden, weight, targets = (each.detach() for each in random_head(torch.bfloat16))
    options = {"chunk_tokens": 3, "product": float32_logits}
    wanted = (hidden.double() @ weight.double().T).log_softmax(-1).gather(1, targets[:, None])
    for logprobs, *_ in on_ranks(2, sharded_logprobs, hidden, weight, targets, options):
        assert_close(logprobs.double(), wanted[:, 0], atol=1e-5, rtol=0)


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
