"""The losses are the papers' equations, transcribed here in float64, one token at a time."""

import pytest
import torch

from rl.algorithms.losses import dapo, grpo, token_weights

LENGTHS = [3, 1, 6, 4]


@pytest.fixture
def rollouts():
    """Four completions end to end; ratios well inside and outside both clip ranges, advantages of both signs."""
    draw = torch.Generator().manual_seed(0)
    count = sum(LENGTHS)
    logprobs = -torch.rand(count, generator=draw) * 3 - 0.1
    columns = {
        "behaviour_logprobs": logprobs + torch.randn(count, generator=draw) * 0.4,
        "advantages": torch.randn(len(LENGTHS), generator=draw).repeat_interleave(torch.tensor(LENGTHS)),
    }
    return logprobs.requires_grad_(), columns


def objective(logprobs, columns, low, high):
    """min(r A, clip(r, 1 - low, 1 + high) A) of each token: GRPO eq. 3 without KL, DAPO eq. 8."""
    values = []
    for logprob, old, advantage in zip(
        logprobs, *(columns[n].double() for n in ("behaviour_logprobs", "advantages")), strict=True
    ):
        ratio = (logprob - old).exp()
        clipped = min(max(ratio, torch.tensor(1 - low)), torch.tensor(1 + high))
        values.append(min(ratio * advantage, clipped * advantage))
    return torch.stack(values)


def grpo_objective(logprobs, columns):
    per_token = objective(logprobs, columns, 0.2, 0.2)
    return sum(o.sum() / len(o) for o in per_token.split(LENGTHS)) / len(LENGTHS)


def dapo_objective(logprobs, columns):
    return objective(logprobs, columns, 0.2, 0.28).sum() / sum(LENGTHS)


@pytest.mark.parametrize(("config", "paper"), [(grpo(), grpo_objective), (dapo(), dapo_objective)])
def test_weighted_mean_and_its_gradient_are_the_papers(rollouts, config, paper):
    logprobs, columns = rollouts
    weights = token_weights(torch.tensor(LENGTHS), config.reduction).repeat_interleave(torch.tensor(LENGTHS))
    loss, _ = config.build()(logprobs, torch.zeros_like(logprobs), columns)
    mean = (loss * weights).sum() / weights.sum()
    mean.backward()

    exact = logprobs.detach().double().requires_grad_()
    wanted = -paper(exact, columns)
    wanted.backward()
    assert mean.item() == pytest.approx(wanted.item(), rel=1e-6)
    torch.testing.assert_close(logprobs.grad.double(), exact.grad, rtol=1e-5, atol=1e-7)
    assert 0 < int((exact.grad == 0).sum()) < len(exact.grad)  # some tokens are clipped, some are not


@pytest.mark.parametrize(
    ("ratio", "advantage", "flows"),
    [(1.5, 1.0, False), (1.5, -1.0, True), (0.5, 1.0, True), (0.5, -1.0, False), (1.1, 1.0, True), (1.1, -1.0, True)],
)
def test_the_clip_stops_only_what_moves_away(ratio, advantage, flows):
    logprobs = torch.tensor([ratio]).log().requires_grad_()
    columns = {"behaviour_logprobs": torch.zeros(1), "advantages": torch.tensor([advantage])}
    loss, _ = grpo().build()(logprobs, torch.zeros(1), columns)
    loss.sum().backward()
    assert bool(logprobs.grad.item()) == flows


def test_clip_high_is_dapos_own_upper_bound():
    logprobs = torch.tensor([1.25, 1.35]).log()
    columns = {"behaviour_logprobs": torch.zeros(2), "advantages": torch.ones(2)}
    assert dapo().build()(logprobs, torch.zeros(2), columns)[0].tolist() == pytest.approx([-1.25, -1.28])
    assert grpo().build()(logprobs, torch.zeros(2), columns)[0].tolist() == pytest.approx([-1.2, -1.2])


def test_the_entropy_bonus_lowers_the_loss_by_its_coefficient(rollouts):
    logprobs, columns = rollouts
    entropy = torch.rand(len(logprobs)).requires_grad_()
    plain, _ = grpo().build()(logprobs, entropy, columns)
    with_bonus, _ = grpo(entropy_coef=0.3).build()(logprobs, entropy, columns)
    torch.testing.assert_close(with_bonus, plain - 0.3 * entropy)
    with_bonus.sum().backward()
    torch.testing.assert_close(entropy.grad, torch.full_like(entropy, -0.3))


def test_the_kl_penalty_is_the_papers(rollouts):
    """GRPO eq. 4: ref / policy - log(ref / policy) - 1."""
    logprobs, columns = rollouts
    columns["reference_logprobs"] = columns["behaviour_logprobs"] - 0.2
    plain, _ = grpo().build()(logprobs, torch.zeros_like(logprobs), columns)
    loss, metrics = grpo(kl_coef=0.3).build()(logprobs, torch.zeros_like(logprobs), columns)
    exact = logprobs.detach().double().requires_grad_()
    ratio = (columns["reference_logprobs"].double() - exact).exp()
    wanted = ratio - ratio.log() - 1
    wanted.sum().backward()
    torch.testing.assert_close(metrics["kl/reference"].values.double(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(loss, plain + 0.3 * wanted.float(), rtol=1e-5, atol=1e-6)
    (loss - plain).sum().backward()
    torch.testing.assert_close(logprobs.grad.double(), 0.3 * exact.grad, rtol=1e-4, atol=1e-6)


def test_metrics_say_how_far_the_policies_are_apart(rollouts):
    logprobs, columns = rollouts
    entropy = torch.rand(len(logprobs))
    _, metrics = dapo().build()(logprobs, entropy, columns)
    ratio = (logprobs.detach() - columns["behaviour_logprobs"]).exp()
    torch.testing.assert_close(metrics["ratio/mean"].values.detach(), ratio)
    assert metrics["ratio/clipped"].values.sum() == ((ratio < 0.8) | (ratio > 1.28)).sum() > 0
    assert (metrics["kl/behaviour"].values >= 0).all()
    same = {**columns, "behaviour_logprobs": logprobs.detach()}
    _, metrics = dapo().build()(logprobs, entropy, same)
    assert metrics["kl/behaviour"].values.abs().max() == 0
    assert metrics["ratio/max"].values.unique().tolist() == [1.0]


def test_token_weights_make_every_completion_or_every_token_count_alike():
    lengths = torch.tensor([1, 4, 10])
    assert token_weights(lengths, "sequence_mean").tolist() == pytest.approx([1.0, 0.25, 0.1])
    assert token_weights(lengths, "token_mean").tolist() == [1.0, 1.0, 1.0]
    assert token_weights(torch.tensor([0]), "sequence_mean").isfinite().all()
