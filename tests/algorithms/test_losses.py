"""The losses are the papers' equations, transcribed here in float64, one token at a time."""

import itertools

import pytest
import torch

from rl.algorithms.losses import (
    CISPOLoss,
    ClippedLoss,
    CrossEntropyLoss,
    DecoupledLoss,
    DistillationLoss,
    DPPOLoss,
    GSPOLoss,
    ImportanceSamplingLoss,
    PolicyLoss,
    ValueLoss,
    dapo,
    grpo,
)
from rl.algorithms.ratio_losses import GMPOLoss, SAPOLoss
from rl.algorithms.tokens import Tokens
from rl.errors import RunError

LENGTHS = [3, 1, 6, 4, 8]


def rollouts(seed=0):
    """Return concatenated completions with ratios inside and outside every clip range and with
    advantages of both signs.

    The second completion and some tokens of the others do not count and are missing.
    """
    draw = torch.Generator().manual_seed(seed)
    count = sum(LENGTHS)
    sizes = torch.tensor(LENGTHS)
    logprobs = -torch.rand(count, generator=draw) * 3 - 0.1
    sequence = torch.arange(len(LENGTHS)).repeat_interleave(sizes)
    counted = (torch.rand(count, generator=draw) > 0.2) & (sequence != 1)

    def near(distance):
        return logprobs - torch.randn(count, generator=draw) * distance

    columns = {
        "behaviour_logprobs": near(0.4),
        "reference_logprobs": near(0.2),
        "teacher_logprobs": near(0.5),
        "advantages": torch.randn(len(LENGTHS), generator=draw)[sequence],
        "values": near(0.3),
        "old_values": near(0.3),
        "returns": near(1.0),
        "entropy": torch.rand(count, generator=draw),
    }
    tokens = {**columns, "logprobs": logprobs, "sequence": sequence}
    return Tokens({name: values[counted] for name, values in tokens.items()})


def rollouts_of(config, seed=0):
    """Return ``rollouts(seed)``, with the proximal policy's log-probs if the loss reads them."""
    tokens = rollouts(seed)
    if config.needs_proximal:
        tokens["proximal_logprobs"] = tokens["teacher_logprobs"]
    return tokens


def exactly(tokens):
    return Tokens(
        {name: values.detach().double() for name, values in tokens.items()},
        sequence=tokens["sequence"],
    )


def one_by_one(cost, *names):
    """Return the paper's cost of all tokens from that of one: a function of its columns."""

    def costs(tokens):
        columns = [
            tokens[name] for name in ("logprobs", "behaviour_logprobs", "advantages", *names)
        ]
        return torch.stack(
            [cost((p - old).exp(), a, p, *rest) for p, old, a, *rest in zip(*columns, strict=True)]
        )

    return costs


def clip(ratio, low, high):
    return min(max(ratio, torch.tensor(low)), torch.tensor(high))


def clipped(low, high):
    return lambda r, a, p: -min(r * a, clip(r, 1 - low, 1 + high) * a)


def dual_clipped(r, a, p):
    plain = min(r * a, clip(r, 0.8, 1.2) * a)
    return -(max(plain, 1.3 * a) if a < 0 else plain)


def dppo(r, a, p):
    moved = p.exp() - p.exp() / r
    return 0.0 * p if abs(moved) > 0.05 and ((a > 0 and r > 1) or (a < 0 and r < 1)) else -r * a


def decoupled(tokens):
    """Return the cost of each token: arXiv:2110.00641, with the behaviour weight up to 1.1."""
    names = ("logprobs", "proximal_logprobs", "behaviour_logprobs", "advantages")
    costs = []
    for p, proximal, behaviour, a in zip(*(tokens[name] for name in names), strict=True):
        ratio = (p - proximal).exp()
        weight = min((proximal - behaviour).exp(), torch.tensor(1.1))
        costs.append(-weight * min(ratio * a, clip(ratio, 0.8, 1.2) * a))
    return torch.stack(costs)


def by_sequence(cost):
    """Return the cost of each token from its sequence's length-normalised ratio: GSPO eq. 7."""

    def costs(tokens):
        values = []
        for number in tokens["sequence"].unique():
            mine = tokens["sequence"] == number
            apart = tokens["logprobs"][mine] - tokens["behaviour_logprobs"][mine]
            ratio = (apart.sum() / len(apart)).exp()
            values += [
                cost(ratio, a, p)
                for a, p in zip(tokens["advantages"][mine], tokens["logprobs"][mine], strict=True)
            ]
        return torch.stack(values)

    return costs


def gspo_token(s, a, p):
    own = s.detach() * p.exp() / p.exp().detach()
    return -min(own * a, clip(own, 0.9, 1.1) * a)


def sapo(r, a, p):
    tau = 1.5 if a > 0 else 2.5
    return -4 / tau / (1 + (-tau * (r - 1)).exp()) * a


def gmpo(tokens):
    """Return the cost of each token: |prod_t min(r_t A, clip(r_t) A)|^(1/T) sign(A)."""
    values = []
    for number in tokens["sequence"].unique():
        mine = tokens["sequence"] == number
        ratios = (tokens["logprobs"][mine] - tokens["behaviour_logprobs"][mine]).exp()
        a = tokens["advantages"][mine][0]
        each = [min(r * a, clip(r, 0.8, 1.3) * a).abs() for r in ratios]
        values += [-(torch.stack(each).prod() ** (1 / len(each))) * a.sign()] * len(each)
    return torch.stack(values)


LOSSES = {
    "GRPO": (grpo(), one_by_one(clipped(0.2, 0.2))),
    "DAPO": (dapo(), one_by_one(clipped(0.2, 0.28))),
    "dual clip": (ClippedLoss.Config(dual_clip=1.3), one_by_one(dual_clipped)),
    "decoupled": (DecoupledLoss.Config(behaviour_cap=1.1), decoupled),
    "GSPO": (GSPOLoss.Config(clip_low=0.1, clip_high=0.1), by_sequence(clipped(0.1, 0.1))),
    "GSPO-token": (
        GSPOLoss.Config(clip_low=0.1, clip_high=0.1, token_level=True),
        by_sequence(gspo_token),
    ),
    "CISPO": (
        CISPOLoss.Config(clip_high=0.2),
        one_by_one(lambda r, a, p: -clip(r.detach(), 0.0, 1.2) * a * p),
    ),
    "DPPO": (DPPOLoss.Config(threshold=0.05), one_by_one(dppo)),
    "SAPO": (SAPOLoss.Config(tau_positive=1.5, tau_negative=2.5), one_by_one(sapo)),
    "GMPO": (GMPOLoss.Config(clip_low=0.2, clip_high=0.3), gmpo),
    "importance sampling": (ImportanceSamplingLoss.Config(), one_by_one(lambda r, a, p: -r * a)),
    "cross entropy": (CrossEntropyLoss.Config(), one_by_one(lambda r, a, p: -p)),
    "distillation": (
        DistillationLoss.Config(),
        one_by_one(lambda r, a, p, q: -r * (q - p.detach()), "teacher_logprobs"),
    ),
    "KL and entropy": (
        grpo(kl_coef=0.3, entropy_coef=0.2, clip_high=0.3),
        one_by_one(
            lambda r, a, p, q, h: (
                clipped(0.2, 0.3)(r, a, p) + 0.3 * ((q - p).exp() - (q - p) - 1) - 0.2 * h
            ),
            *("reference_logprobs", "entropy"),
        ),
    ),
    "KL of k2": (
        grpo(kl_coef=0.3, kl_estimator="k2"),
        one_by_one(
            lambda r, a, p, q: clipped(0.2, 0.2)(r, a, p) + 0.3 * (p - q) ** 2 / 2,
            "reference_logprobs",
        ),
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_match_the_papers(name):
    """Weights differ by token, so that errors do not cancel in a sum."""
    config, paper = LOSSES[name]
    tokens = rollouts_of(config, 0)
    exact = exactly(tokens)
    weights = torch.rand(len(tokens["logprobs"])) + 0.5
    logprobs = tokens["logprobs"].requires_grad_()
    loss, metrics = config.build()(tokens)
    (gradient,) = torch.autograd.grad((loss * weights).sum(), logprobs)
    if "ratio/clipped" in metrics:  # some tokens, and not all
        assert 0 < metrics["ratio/clipped"].values.mean() < 1
    costs = paper(exact | {"logprobs": exact["logprobs"].requires_grad_()})
    (wanted,) = torch.autograd.grad((costs * weights).sum(), exact["logprobs"])
    torch.testing.assert_close(loss.detach().double(), costs.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient.double(), wanted, rtol=2e-6, atol=1e-6)


def test_the_ratio_uses_the_proximal_policy_if_it_exists():
    tokens = rollouts()
    plain, _ = dapo().build()(tokens)
    moved = Tokens(
        tokens,
        proximal_logprobs=tokens["behaviour_logprobs"],
        behaviour_logprobs=tokens["logprobs"] - 9,
    )
    loss, metrics = dapo().build()(moved)
    assert torch.equal(loss, plain)
    assert metrics["logprob/error_max"].values.tolist() == pytest.approx([9.0] * len(loss))


def test_log_prob_errors_and_drift_of_stale_tokens_are_separate_metrics():
    tokens = rollouts()
    staleness = torch.arange(len(tokens["logprobs"])) % 3
    _, metrics = dapo().build()(Tokens(tokens, staleness=staleness))
    difference = (tokens["logprobs"] - tokens["behaviour_logprobs"]).abs()
    for name, reduction, counted in (
        ("error_mean", "mean", staleness == 0),
        ("error_max", "max", staleness == 0),
        ("drift_max", "max", staleness > 0),
    ):
        values, rule, weights = metrics[f"logprob/{name}"]
        assert rule == reduction and torch.equal(weights, counted)
        assert torch.equal(values, difference)
    values, rule, weights = metrics["logprob/differing_tokens"]
    assert rule == "sum" and torch.equal(weights, staleness == 0)
    assert torch.equal(values, (difference != 0).float())


def test_the_behaviour_weight_and_its_cap_are_measured():
    config = DecoupledLoss.Config(behaviour_cap=1.1)
    _, metrics = config.build()(rollouts_of(config))
    weights = metrics["behaviour/weight"].values
    assert 0 < weights.min() < weights.max() == pytest.approx(1.1)
    assert torch.equal(metrics["behaviour/capped"].values > 0, weights == weights.max())
    assert 0 < metrics["behaviour/capped"].values.mean() < 1


def test_a_correction_weights_only_the_surrogate():
    tokens = rollouts()
    weights = torch.arange(len(tokens["logprobs"])) / 7.0
    plain, _ = grpo().build()(tokens)
    whole, _ = grpo(kl_coef=0.3, entropy_coef=0.2).build()(tokens)
    loss, _ = grpo(kl_coef=0.3, entropy_coef=0.2).build()(Tokens(tokens, correction=weights))
    torch.testing.assert_close(loss, whole - plain + weights * plain)


CLIPPED = [grpo(dual_clip=3.0), GSPOLoss.Config(), CISPOLoss.Config(), GMPOLoss.Config()]
BEYOND = [(-1e4, -1.0), (-0.1, -200.0), (-1e4, -2e4)]


@pytest.mark.parametrize(
    ("config", "apart", "advantage"),
    [
        *itertools.product(CLIPPED, BEYOND, [1.0, 0.0]),
        *itertools.product([DPPOLoss.Config()], BEYOND[:2], [1.0]),
        *itertools.product([SAPOLoss.Config()], BEYOND, [1.0, 0.0, -1.0]),
    ],
)
def test_ratios_beyond_float32_leave_the_gradient_finite(config, apart, advantage):
    """The cases are those in which the paper's gradient is finite."""
    logprob, behaviour = apart
    logprobs = torch.tensor([logprob, -1.0]).requires_grad_()
    tokens = Tokens(
        behaviour_logprobs=torch.tensor([behaviour, -1.0]),
        advantages=torch.tensor([advantage, 1.0]),
        logprobs=logprobs,
        entropy=torch.zeros(2),
        sequence=torch.tensor([0, 1]),
    )
    loss, _ = config.build()(tokens)
    loss.sum().backward()
    assert loss.isfinite().all() and logprobs.grad.isfinite().all()


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_does_not_wait_for_the_device(name):
    """Tensors on meta have no numbers to read."""
    config, _ = LOSSES[name]
    tokens = Tokens({n: values.to("meta") for n, values in rollouts_of(config).items()})
    tokens.sequences = len(LENGTHS)
    assert config.build()(tokens)[0].shape == tokens["logprobs"].shape


@pytest.mark.parametrize("name", LOSSES)
def test_without_tokens_the_loss_is_empty_and_still_has_a_gradient(name):
    """A rank gets an empty micro-batch if another rank has more micro-batches."""
    config, _ = LOSSES[name]
    nothing = Tokens({n: values[:0] for n, values in rollouts_of(config).items()})
    logprobs = nothing["logprobs"].requires_grad_()
    loss, _ = config.build()(nothing)
    loss.sum().backward()
    assert loss.shape == logprobs.grad.shape == (0,)


def test_distillation_descends_the_divergence_from_the_teacher():
    """The expected gradient on tokens of another policy is that of KL(student || teacher)."""
    draw = torch.Generator().manual_seed(0)
    logits, teacher, sampler = torch.randn(3, 6, generator=draw, dtype=torch.float64)
    logits.requires_grad_()
    logprobs, teacher, sampler = (values.log_softmax(0) for values in (logits, teacher, sampler))
    columns = {"teacher_logprobs": teacher, "behaviour_logprobs": sampler}
    tokens = Tokens(columns, logprobs=logprobs, entropy=torch.zeros(6))
    loss, _ = DistillationLoss.Config().build()(tokens)
    (gradient,) = torch.autograd.grad((sampler.exp() * loss).sum(), logits, retain_graph=True)
    (wanted,) = torch.autograd.grad((logprobs.exp() * (logprobs - teacher)).sum(), logits)
    torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_value_loss_and_gradient_match_the_formula(clip):
    tokens = rollouts()
    exact = exactly(tokens)
    values = tokens["values"].requires_grad_()
    loss, metrics = ValueLoss.Config(clip=clip).build()(tokens)
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    exact["values"].requires_grad_()
    wanted = []
    columns = (exact[name] for name in ("values", "old_values", "returns"))
    for v, old, target in zip(*columns, strict=True):
        near = min(max(v, old - clip), old + clip) if clip else v
        wanted.append(0.5 * max((v - target) ** 2, (near - target) ** 2))
    costs = torch.stack(wanted)
    (exact_gradient,) = torch.autograd.grad(costs.sum(), exact["values"])
    torch.testing.assert_close(loss.detach().double(), costs.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient.double(), exact_gradient, rtol=1e-6, atol=1e-6)
    some_are_clipped = 0 < int((gradient == 0).sum()) < len(gradient)
    assert some_are_clipped == ("value/clipped" in metrics) == bool(clip)


def test_metrics_measure_the_distance_of_the_policies():
    tokens = rollouts()
    _, metrics = dapo().build()(tokens)
    ratio = (tokens["logprobs"] - tokens["behaviour_logprobs"]).exp()
    torch.testing.assert_close(metrics["ratio/mean"].values, ratio)
    assert metrics["ratio/clipped"].values.sum() == ((ratio < 0.8) | (ratio > 1.28)).sum() > 0
    assert all((metrics[f"kl/{of}"].values >= 0).all() for of in ("behaviour", "reference"))
    _, metrics = dapo().build()(Tokens(tokens, behaviour_logprobs=tokens["logprobs"]))
    assert metrics["kl/behaviour"].values.abs().max() == 0
    assert metrics["ratio/max"].values.unique().tolist() == [1.0]


def test_supervised_tokens_need_no_columns():
    logprobs = torch.tensor([-1.0, -2.0])
    loss, _ = CrossEntropyLoss.Config().build()(Tokens(logprobs=logprobs, entropy=torch.ones(2)))
    assert loss.tolist() == [1.0, 2.0]


def test_a_missing_column_is_named():
    tokens = rollouts()
    del tokens["reference_logprobs"]
    message = "the loss needs reference_logprobs, .* it has advantages, behaviour_logprobs, "
    with pytest.raises(RunError, match=message):
        grpo(kl_coef=0.1).build()(tokens)
    with pytest.raises(NotImplementedError):
        PolicyLoss.Config().build()(tokens)
