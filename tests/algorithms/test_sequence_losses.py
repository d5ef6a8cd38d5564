"""The losses are the papers' equations, transcribed here in float64, one pair at a time."""

import math

import pytest
import torch

from rl.algorithms.loss_results import value_of
from rl.algorithms.sequence_losses import (
    BradleyTerryLoss,
    DPOLoss,
    IPOLoss,
    KTOLoss,
    Labels,
    SequenceLoss,
    SimPOLoss,
)
from rl.algorithms.sequence_scores import (
    LinearLoss,
    LossOfPairs,
    coefficients,
    pair_batch,
    score_batch,
    sequence_scores,
    with_coefficients,
    with_mismatched,
)
from rl.algorithms.tokens import Tokens
from rl.errors import RunError
from rl.metrics import Metrics
from rl.types import Batch

PAIRS = 6
DESIRABLE = torch.tensor([True, False, False, True, True, True])


def scores_of(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of a policy and of its reference, some far and some near."""
    draw = torch.Generator().manual_seed(seed)
    scores = -torch.rand(count, generator=draw, dtype=torch.float64) * 30
    return scores, scores + torch.randn(count, generator=draw, dtype=torch.float64) * 4


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + (-x).exp())


def by_pair(cost):
    """Mean over pairs (0, 1), (2, 3)... of the cost of four scores, two of the reference."""

    def mean(scores, reference):
        costs = [
            cost(scores[2 * i], scores[2 * i + 1], reference[2 * i], reference[2 * i + 1])
            for i in range(PAIRS)
        ]
        return sum(costs) / PAIRS

    return mean


def dpo(beta, swapped=0.0):
    def cost(w, x, ref_w, ref_x):
        h = beta * (w - ref_w) - beta * (x - ref_x)
        return -(1 - swapped) * sigmoid(h).log() - swapped * sigmoid(-h).log()

    return by_pair(cost)


def ipo(tau):
    return by_pair(lambda w, x, ref_w, ref_x: (w - x - (ref_w - ref_x) - 1 / (2 * tau)) ** 2)


def simpo(beta, gamma):
    return by_pair(lambda w, x, *_: -sigmoid(beta * w - beta * x - gamma).log())


def bradley_terry(margin=0.0, centering=0.0):
    return by_pair(lambda w, x, *_: -sigmoid(w - x - margin).log() + centering * (w + x) ** 2)


LOSSES = {
    "DPO": (DPOLoss.Config(beta=0.3), dpo(0.3)),
    "conservative DPO": (DPOLoss.Config(beta=0.3, label_smoothing=0.2), dpo(0.3, 0.2)),
    "IPO": (IPOLoss.Config(tau=0.4), ipo(0.4)),
    "SimPO": (SimPOLoss.Config(beta=0.7, gamma=0.6), simpo(0.7, 0.6)),
    "reward model": (BradleyTerryLoss.Config(), bradley_terry()),
    "centred reward model with a margin": (
        BradleyTerryLoss.Config(margin=0.8, centering_coef=0.01),
        bradley_terry(0.8, 0.01),
    ),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_of_pairs_are_the_papers(name, seed):
    config, paper = LOSSES[name]
    scores, reference = scores_of(2 * PAIRS, seed)
    leaf = scores.clone().requires_grad_()
    mean = paper(leaf, reference)
    mean.backward()
    loss = config.build()
    gradient, value, metrics = coefficients(
        loss, scores, reference if loss.needs_reference else None, Labels.pairs(PAIRS)
    )
    assert loss.count(Labels.pairs(PAIRS)) == PAIRS
    torch.testing.assert_close(gradient / PAIRS, leaf.grad, rtol=1e-9, atol=1e-12)
    assert value == metrics["loss/mean"] == pytest.approx(mean.item(), rel=1e-12)


def kto(scores, reference, beta, desirable_weight, undesirable_weight):
    """Mean over the examples, and z, from rows that are followed by as many mismatched ones."""
    count = len(DESIRABLE)
    h = scores - reference
    z = max(0.0, sum(h[count:].tolist()) / count)
    total = 0.0
    for i, good in enumerate(DESIRABLE):
        value = (
            desirable_weight * sigmoid(beta * (h[i] - z))
            if good
            else undesirable_weight * sigmoid(beta * (z - h[i]))
        )
        total = total + (desirable_weight if good else undesirable_weight) - value
    return total / count, z


@pytest.mark.parametrize("direction", [1.0, -1.0])
def test_loss_and_gradient_of_kto_are_the_papers(direction):
    """The baseline is above 0, or is 0 for an estimate below 0."""
    scores, reference = scores_of(2 * len(DESIRABLE))
    reference[6:] = scores[6:] - direction * torch.arange(6)
    leaf = scores.clone().requires_grad_()
    mean, z = kto(leaf, reference, 0.2, 1.3, 0.9)
    mean.backward()
    assert (z > 0) == (direction > 0)
    loss = KTOLoss.Config(beta=0.2, desirable_weight=1.3, undesirable_weight=0.9).build()
    labels = Labels.unpaired(DESIRABLE)
    gradient, value, metrics = coefficients(loss, scores, reference, labels)
    assert loss.count(labels) == 6
    torch.testing.assert_close(gradient / 6, leaf.grad, rtol=1e-9, atol=1e-12)
    assert not gradient[6:].any()
    assert value == pytest.approx(mean.item(), rel=1e-12)
    assert metrics["kl/baseline"] == pytest.approx(z, rel=1e-12)


def test_a_reward_model_takes_the_margins_of_its_labels():
    scores, _ = scores_of(2 * PAIRS)
    margins = torch.arange(PAIRS) / 2
    wanted = [-sigmoid(scores[2 * i] - scores[2 * i + 1] - margins[i]).log() for i in range(PAIRS)]
    loss = BradleyTerryLoss.Config(margin=7.0).build()
    _, value, _ = coefficients(loss, scores, None, Labels.pairs(PAIRS, margins))
    assert value == pytest.approx(float(sum(wanted)) / PAIRS, rel=1e-12)


def test_a_sequence_may_be_in_several_pairs():
    """Its coefficient is the sum over them."""
    scores = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    labels = Labels(chosen=torch.tensor([0, 0, 2]), rejected=torch.tensor([1, 2, 1]))
    leaf = scores.clone().requires_grad_()
    total = -sum(sigmoid(leaf[w] - leaf[x]).log() for w, x in ((0, 1), (0, 2), (2, 1)))
    total.backward()
    gradient, _, _ = coefficients(BradleyTerryLoss.Config().build(), scores, None, labels)
    torch.testing.assert_close(gradient, leaf.grad)


REWARDS = {f"rewards/{name}" for name in ("chosen", "rejected", "margin", "accuracy")}
LOGPS = {"logps/chosen", "logps/rejected"}


@pytest.mark.parametrize("name", LOSSES)
def test_metrics_of_pairs_are_means_and_merge_exactly(name):
    scores, reference = scores_of(2 * PAIRS)
    loss = LOSSES[name][0].build()
    gradient, _, metrics = coefficients(loss, scores, reference, Labels.pairs(PAIRS))
    logps = LOGPS if loss.head == "logprobs" else set()
    assert metrics.keys() == {"loss/mean"} | REWARDS | logps
    if loss.head == "logprobs":
        assert metrics["logps/chosen"] == pytest.approx(scores[::2].mean().item())
        assert metrics["logps/rejected"] == pytest.approx(scores[1::2].mean().item())
    parts = [
        coefficients(loss, scores[a:b], reference[a:b], Labels.pairs((b - a) // 2))
        for a, b in ((0, 2), (2, 12))
    ]
    assert Metrics.merged(part[2] for part in parts) == pytest.approx(metrics, rel=1e-12)
    assert torch.equal(torch.cat([part[0] for part in parts]), gradient)


@pytest.mark.parametrize(
    ("config", "scale", "compared"),
    [
        (DPOLoss.Config(beta=0.3), 0.3, True),
        (IPOLoss.Config(tau=0.4), 0.4, True),
        (SimPOLoss.Config(beta=0.7), 0.7, False),
        (BradleyTerryLoss.Config(), 1.0, False),
        (KTOLoss.Config(beta=0.2), 0.2, True),
    ],
)
def test_rewards_are_scaled_scores_or_log_ratios(config, scale, compared):
    scores, reference = scores_of(12)
    is_kto = isinstance(config, KTOLoss.Config)
    labels = Labels.unpaired(DESIRABLE) if is_kto else Labels.pairs(PAIRS)
    rewards = scale * (scores - reference if compared else scores)
    chosen = rewards[labels.chosen]
    rejected = rewards[labels.rejected]
    _, _, metrics = coefficients(config.build(), scores, reference, labels)
    assert metrics["rewards/chosen"] == pytest.approx(chosen.mean().item())
    assert metrics["rewards/rejected"] == pytest.approx(rejected.mean().item())
    assert metrics["rewards/margin"] == pytest.approx((chosen.mean() - rejected.mean()).item())
    z = scale * metrics["kl/baseline"] if is_kto else 0.0
    right = [*(chosen > z), *(rejected < z)] if is_kto else [*(chosen > rejected)]
    assert 0 < metrics["rewards/accuracy"] == sum(right) / len(right) < 1


def test_kto_takes_examples_of_one_kind_alone():
    scores, reference = scores_of(4)
    loss = KTOLoss.Config().build()
    _, value, metrics = coefficients(
        loss, scores, reference, Labels.unpaired(torch.tensor([True, True]))
    )
    assert math.isfinite(value)
    assert not metrics.keys() & {"rewards/rejected", "rewards/margin", "logps/rejected"}


@pytest.mark.parametrize("name", [*LOSSES, "KTO"])
def test_far_scores_leave_the_gradient_finite(name):
    scores = torch.tensor([-1e5, 1e5, 1e5, -1e5])
    config, labels = KTOLoss.Config(), Labels.unpaired(torch.tensor([True, False]))
    if name != "KTO":
        config, labels = LOSSES[name][0], Labels.pairs(2)
    gradient, value, _ = coefficients(config.build(), scores, torch.zeros(4), labels)
    assert gradient.isfinite().all() and math.isfinite(value)


class Sum(SequenceLoss):
    def __call__(self, scores, reference, labels):
        return scores.sum(), {}


UNPAIRED = Labels.unpaired(torch.tensor([True, False]))
UNEVEN = Labels(chosen=torch.tensor([0]), rejected=torch.tensor([1, 2]))


@pytest.mark.parametrize(
    ("loss", "labels", "known", "message"),
    [
        (DPOLoss.Config().build(), Labels.pairs(2), None, "has no scores of it"),
        (IPOLoss.Config().build(), Labels.pairs(2), None, "has no scores of it"),
        (KTOLoss.Config().build(), UNPAIRED, None, "has no scores of it"),
        (KTOLoss.Config().build(), Labels.pairs(2), 4, "KTOLoss needs mismatched sequences"),
        (DPOLoss.Config().build(), UNEVEN, 4, "the labels have 1 chosen and 2 rejected"),
        (DPOLoss.Config().build(), Labels.pairs(2), 3, "4 scores have 3 of the reference"),
        (DPOLoss.Config().build(), Labels.pairs(0), 4, "DPOLoss has no examples"),
        (Sum(SequenceLoss.Config()), Labels.pairs(2), None, "Sum returned costs of shape"),
    ],
)
def test_inputs_that_a_loss_cannot_compare_are_named(loss, labels, known, message):
    scores, reference = scores_of(4)
    with pytest.raises(RunError, match=message):
        coefficients(loss, scores, None if known is None else reference[:known], labels)


def batch_of() -> Batch:
    """Two sequences: prompts of 2 and 1, and a tool's token within the first completion."""
    return Batch(
        tokens=torch.tensor([10, 11, 12, 13, 14, 20, 21, 22]),
        lengths=torch.tensor([5, 3]),
        loss_weights=torch.tensor([0, 0, 0.7, 0, 0.2, 0, 3.0, 5.0]),
        columns={"advantages": torch.ones(8)},
    )


@pytest.mark.parametrize("normalized", [False, True])
def test_a_score_is_the_sum_or_mean_of_the_trained_tokens(normalized):
    logprobs = torch.tensor([9.0, 9.0, -1.0, 9.0, -2.0, 9.0, -4.0, -6.0])
    loss = DPOLoss.Config(length_normalized=normalized).build()
    batch = score_batch(batch_of(), loss)
    scores = sequence_scores(batch, logprobs)
    assert scores.dtype == torch.float64
    assert scores.tolist() == ([-1.5, -5.0] if normalized else [-3.0, -10.0])
    assert torch.equal(batch.loss_mask, batch_of().loss_mask)


@pytest.mark.parametrize("normalized", [False, True])
def test_the_linear_loss_has_the_gradient_of_the_scores(normalized):
    loss = DPOLoss.Config(length_normalized=normalized).build()
    batch = score_batch(batch_of(), loss)
    learned = with_coefficients(batch, torch.tensor([0.3, -0.8], dtype=torch.float64))
    assert [*learned.columns] == ["coefficients"]
    logprobs = torch.randn(8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    mask = batch.loss_mask
    tokens = Tokens(logprobs=logprobs[mask], coefficients=learned.columns["coefficients"][mask])
    costs, metrics = LinearLoss.Config().build()(tokens)
    assert costs.dtype == torch.float32 and metrics == {}
    (gradient,) = torch.autograd.grad((costs * batch.loss_weights[mask]).sum(), logprobs)
    weighted = (sequence_scores(batch, logprobs) * torch.tensor([0.3, -0.8])).sum()
    (wanted,) = torch.autograd.grad(weighted, logprobs)
    torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize(
    ("config", "margins", "known"),
    [
        (DPOLoss.Config(beta=0.3), None, torch.tensor([-1.23456789012, -7.0]).double()),
        (IPOLoss.Config(), None, torch.tensor([-1.0, -3.00000000007]).double()),
        (BradleyTerryLoss.Config(), torch.tensor([0.7]), None),
    ],
)
def test_pairs_in_one_pass_have_the_coefficients_and_metrics_of_two(config, margins, known):
    loss = config.build()
    batch = score_batch(batch_of(), loss)
    labels = Labels.pairs(1, margins)
    output = torch.randn(len(batch.tokens), generator=torch.Generator().manual_seed(0))
    scores = sequence_scores(batch, output)
    wanted, _, measured = coefficients(loss, scores, known, labels)
    learned = pair_batch(batch, labels, known)
    mask = batch.loss_mask
    columns = {name: values[mask] for name, values in learned.columns.items()}
    owner = torch.repeat_interleave(torch.arange(2), batch.lengths)[mask]
    own = {loss.head: output[mask].requires_grad_(), "sequence": owner}
    of_pairs = LossOfPairs.Config(loss=config).build()
    costs, metrics = of_pairs(Tokens(columns | own))
    assert torch.equal(costs, wanted.float()[owner] * output[mask])
    assert {name: value_of(metric).value for name, metric in metrics.items()} == dict(measured)
    assert (learned.together, learned.denominators.tolist()) == (2, [1.0, 1.0])
    unread = Tokens({name: values.to("meta") for name, values in (columns | own).items()})
    unread.sequences = 2
    assert of_pairs(unread)[0].shape == costs.shape  # the loss waits for no number of the device


def test_a_reward_models_score_is_the_value_after_the_last_token():
    """Entry t of the values is computed from the tokens before t."""
    batch = score_batch(batch_of(), BradleyTerryLoss.Config().build())
    assert batch.lengths.tolist() == [6, 4]
    assert batch.tokens.tolist() == [10, 11, 12, 13, 14, 0, 20, 21, 22, 0]
    assert batch.loss_mask.nonzero().flatten().tolist() == [5, 9]
    assert sequence_scores(batch, torch.arange(10.0)).tolist() == [5.0, 9.0]


def test_sequences_without_a_trained_token_have_no_score():
    batch = Batch(
        tokens=torch.arange(5),
        lengths=torch.tensor([3, 2]),
        loss_weights=torch.tensor([0, 0, 1.0, 0, 0]),
    )
    with pytest.raises(RunError, match="sequence 1 of the batch has no trained token"):
        score_batch(batch, SimPOLoss.Config().build())


def test_mismatched_sequences_are_prompts_with_the_next_completion():
    batch = with_mismatched(batch_of(), max_tokens=5)
    rows = batch.tokens.split(batch.lengths.tolist())
    weights = batch.loss_weights.split(batch.lengths.tolist())
    assert [row.tolist() for row in rows[2:]] == [[10, 11, 21, 22], [20, 12, 13, 14]]
    assert [row.bool().int().tolist() for row in weights[2:]] == [[0, 0, 1, 1], [0, 1, 0, 1]]
    assert torch.equal(torch.cat(rows[:2]), batch_of().tokens)
    assert torch.equal(torch.cat(weights[:2]), batch_of().loss_weights)
    cut = with_mismatched(batch_of(), max_tokens=3)
    assert cut.lengths.tolist() == [5, 3, 3, 3]
    with pytest.raises(RunError, match="at least two sequences"):
        with_mismatched(batch_of().select([0]), max_tokens=5)


def test_mismatched_sequences_are_not_learned():
    loss = KTOLoss.Config().build()
    batch = score_batch(with_mismatched(batch_of(), max_tokens=5), loss)
    learned = with_coefficients(batch, torch.tensor([0.25, -0.5]))
    assert learned.lengths.tolist() == [5, 3]
    assert learned.columns["coefficients"].tolist() == [0.25] * 5 + [-0.5] * 3
