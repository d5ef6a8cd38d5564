"""Each loss is Tinker's formula, by autograd in float64."""

import pytest
import torch

from rl.algorithms.tokens import Tokens
from rl.tinker.losses import FORMULAS, SAMPLED, SUM, TinkerLoss

COUNT = 9
SEQUENCE = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 2])


def tokens_of(**more: torch.Tensor | float) -> Tokens:
    """Tokens of three sequences, with ratios on both sides of clip ranges, and ``more``."""
    draw = torch.Generator().manual_seed(0)
    columns = {
        name: torch.randn(COUNT, generator=draw, dtype=torch.float64)
        for name in ("logprobs", SAMPLED, "advantages", "weights")
    }
    mask = torch.tensor([0.0, 1, 1, 0, 1, 1, 0, 0, 1], dtype=torch.float64)
    columns |= {"sequence": SEQUENCE, "sequence_ratio_mask": mask}
    tokens = Tokens(columns | {name: each + torch.zeros_like(mask) for name, each in more.items()})
    tokens["logprobs"].requires_grad_()
    return tokens


def clipped(ratio, t, low, high):
    return -torch.minimum(ratio * t["advantages"], ratio.clamp(low, high) * t["advantages"])


def sequence_ratio(t):
    difference = t["logprobs"].detach() - t[SAMPLED]
    counted = t["sequence_ratio_mask"] > 0
    means = torch.stack([difference[counted & (row == SEQUENCE)].mean() for row in range(3)])
    return means[SEQUENCE].exp() * (t["logprobs"] - t["logprobs"].detach()).exp()


def ratio(t):
    return (t["logprobs"] - t[SAMPLED]).exp()


LOW = torch.linspace(0.5, 1.5, COUNT, dtype=torch.float64)
WANTED = {
    "cross_entropy": ({}, lambda t: -t["weights"] * t["logprobs"]),
    "importance_sampling": ({}, lambda t: -ratio(t) * t["advantages"]),
    "ppo": ({}, lambda t: clipped(ratio(t), t, 0.8, 1.2)),
    "cispo": (
        {},
        lambda t: -ratio(t).detach().clamp(0.0, 4.0) * t["logprobs"] * t["advantages"],
    ),
    "dro": (
        {"beta": 0.3},
        lambda t: -(t["logprobs"] * t["advantages"] - 0.15 * (t["logprobs"] - t[SAMPLED]).square()),
    ),
    "gspo": (
        {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1},
        lambda t: clipped(sequence_ratio(t), t, 0.7, 1.1),
    ),
    "stable_reinforce": (
        {"kl_coeff": 0.4},
        lambda t: (
            0.2 * (t["logprobs"] - t[SAMPLED]).square()
            - ratio(t).detach().clamp(max=1) * t["advantages"] * t["logprobs"]
        ),
    ),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_loss_and_its_gradient_are_those_of_its_formula(name):
    settings, formula = WANTED[name]
    check(name, formula, tokens_of(**{**FORMULAS[name].settings, **settings}))


@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo"])
def test_each_token_has_thresholds_of_its_own(name):
    given = tokens_of(clip_low_threshold=LOW, clip_high_threshold=LOW + 0.2)
    formulas = {
        "ppo": lambda t: clipped(ratio(t), t, LOW, LOW + 0.2),
        "gspo": lambda t: clipped(sequence_ratio(t), t, LOW, LOW + 0.2),
        "cispo": lambda t: (
            -ratio(t).detach().clamp(LOW, LOW + 0.2) * t["logprobs"] * t["advantages"]
        ),
    }
    check(name, formulas[name], given)


def check(name: str, formula, tokens: Tokens) -> None:
    costs, metrics = TinkerLoss.Config(name=name).build()(tokens)
    wanted = formula(tokens)
    torch.testing.assert_close(costs, wanted)
    torch.testing.assert_close(metrics[SUM].values, wanted)
    assert metrics[SUM].reduction == "sum"
    found, expected = (
        torch.autograd.grad(each.sum(), tokens["logprobs"]) for each in (costs, wanted)
    )
    assert expected[0].count_nonzero() > 0
    torch.testing.assert_close(found, expected)


def test_a_clipped_ratio_that_overflows_has_a_gradient():
    huge = torch.full((COUNT,), 1e4, dtype=torch.float64)
    settings = FORMULAS["ppo"].settings
    tokens = tokens_of(logprobs=huge, advantages=torch.ones_like(huge), **settings)
    costs, _ = TinkerLoss.Config(name="ppo").build()(tokens)
    (gradient,) = torch.autograd.grad(costs.sum(), tokens["logprobs"])
    assert costs.isfinite().all() and gradient.eq(0).all()
