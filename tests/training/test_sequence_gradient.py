"""One gradient (C1) of losses over whole sequences, however the batch is cut: that of autograd
through a float64 model on all sequences at once.
"""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

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
from rl.metrics import Metrics
from rl.training.engine import TrainingEngine
from rl.types import Batch, Head
from tests.kit.batches import ragged_batch
from tests.kit.layouts import LAYOUTS, PAIRS
from tests.kit.ranks import on_ranks
from tests.kit.reference import Qwen3, of_scene, per_token, relative_error, worst_error
from tests.kit.scenes import (
    MODELS,
    cut_by,
    engine_of,
    gradients_of,
    rows_of,
    share,
    weights_of,
)
from tests.kit.tables import cases, long

LOSSES: dict[str, SequenceLoss.Config] = {
    "DPO": DPOLoss.Config(beta=0.3, label_smoothing=0.1),
    "length-normalized DPO": DPOLoss.Config(length_normalized=True),
    "IPO": IPOLoss.Config(),
    "IPO of sums": IPOLoss.Config(length_normalized=False),
    "KTO": KTOLoss.Config(beta=0.2, undesirable_weight=1.5),
    "SimPO": SimPOLoss.Config(),
    "reward model": BradleyTerryLoss.Config(margin=0.3, centering_coef=0.1),
}
ROWS = ragged_batch((4, 15, 9, 7, 11, 5))
ALL = [[0, 1, 2, 3, 4, 5]]

CUTS: dict[str, tuple[dict[str, Any], list[list[int]]]] = {
    "one by one": ({"micro_batch_size": 1}, ALL),
    "by two": ({"micro_batch_size": 2}, ALL),
    "by three": ({"micro_batch_size": 3}, ALL),
    "all at once": ({"micro_batch_size": 6}, ALL),
    "padded": ({"micro_batch_size": 4, "packing": False}, ALL),
    "20 tokens": ({"micro_batch_tokens": 20}, ALL),
    "32 tokens, padded": ({"micro_batch_tokens": 32, "packing": False}, ALL),
    "each pair in two calls": ({"micro_batch_size": 2}, [[0, 3, 4], [5, 2, 1]]),
}
"""Fields of the engine, and the rows of each call of forward_backward."""

PAIRWISE: dict[str, tuple[dict[str, Any], list[list[int]]]] = {
    **{name: cut for name, cut in CUTS.items() if cut[1] == ALL},
    "two calls": ({"micro_batch_size": 2}, [[4, 5], [0, 1, 2, 3]]),
    "shared prompts": ({"micro_batch_size": 6, "prompt_sharing": 2}, ALL),
}
"""The same with both sequences of each pair in one call."""


def example(loss: SequenceLoss) -> tuple[Batch, Labels, torch.Tensor]:
    """A batch, its labels and the scores of a reference policy."""
    if isinstance(loss, KTOLoss):
        batch = with_mismatched(ROWS, max_tokens=15)
        labels = Labels.unpaired(torch.tensor([True, False, True, True, False, False]))
    else:
        batch = ROWS
        labels = Labels.pairs(3)
    draw = torch.Generator().manual_seed(7)
    steps = torch.ones(len(batch)) if loss.config.length_normalized else batch.lengths / 2
    reference = steps * (0.3 * torch.randn(len(batch), generator=draw) - 3.6)
    return batch, labels, reference.double()


def direct(weights: dict[str, torch.Tensor], loss: SequenceLoss) -> tuple[Any, float]:
    """(gradient, value) of the mean over examples, by autograd through the whole model. The
    gradient is that of the balance loss too, of all sequences that are trained on.
    """
    model = of_scene(weights)
    batch, labels, reference = example(loss)
    scores = []
    balance = []
    for tokens, trained in sequences(batch):
        scores.append(score(model, tokens, trained, loss))
        balance.append(model.balance_loss(len(tokens) - (loss.head == "logprobs")))
    costs, _ = loss(torch.stack(scores), reference, labels)
    (costs.mean() + sum(balance[: len(ROWS)]) / len(costs)).backward()
    return {name: weight.grad for name, weight in model.weights.items()}, costs.mean().item()


def sequences(batch: Batch) -> Any:
    sizes = batch.lengths.tolist()
    return zip(batch.tokens.split(sizes), batch.loss_weights.split(sizes), strict=True)


def score(
    model: Qwen3, tokens: torch.Tensor, weights: torch.Tensor, loss: SequenceLoss
) -> torch.Tensor:
    """Sum or mean of the trained tokens' log-probs, or the value at the last token."""
    if loss.head == "values":
        return model(tokens.tolist())[-1, 0]
    logprobs, _ = per_token(model, tokens.tolist(), 1.0)
    trained = logprobs[weights[1:] > 0]
    return trained.mean() if loss.config.length_normalized else trained.sum()


def scores_of(engine: TrainingEngine, batch: Batch, head: Head) -> torch.Tensor:
    """Scores [n] of the whole batch, from the ranks that each have a part."""
    rows = rows_of(engine, batch)
    part = batch.select(rows)
    own = (rows, sequence_scores(part, engine.forward(part)[head]))
    parts: list[Any] = [own]
    if dist.get_world_size() > 1:
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, own)
    scores = torch.full((len(batch),), math.nan, dtype=torch.float64)
    for index, values in parts:
        scores[index] = values
    return scores


def accumulate(engine: TrainingEngine, loss: SequenceLoss, calls: list[list[int]]) -> Metrics:
    """Add the gradient of the example's loss; return the metrics."""
    batch, labels, reference = example(loss)
    batch = score_batch(batch, loss)
    scores = scores_of(engine, batch, loss.head)
    values, _, metrics = coefficients(loss, scores, reference, labels)
    learned = with_coefficients(batch, values[: len(ROWS)])
    for rows in calls:
        part = share(engine, learned.select(rows))
        engine.forward_backward(part, LinearLoss.Config(head=loss.head).build())
    return metrics


def accumulate_pairs(engine: TrainingEngine, loss: SequenceLoss, calls: list[list[int]]) -> Metrics:
    """The same in one pass, for a loss of pairs."""
    batch, labels, reference = example(loss)
    known = reference if loss.needs_reference else None
    batch = pair_batch(score_batch(batch, loss), labels, known)
    pairs = LossOfPairs.Config(loss=loss.config).build()
    parts = [engine.forward_backward(share(engine, batch.select(rows)), pairs) for rows in calls]
    return Metrics.merged(metrics for _, metrics in parts)


def engines(folder: str, layout: str, sizes: str = "tied_fused") -> dict[Head, TrainingEngine]:
    """A policy, and a reward model with a head that is not 0."""
    model = MODELS[sizes]
    fields: dict[str, Any] = {"folder": folder, "layout": LAYOUTS[layout], "lr": 0.0, "steps": 99}
    judge = engine_of(model, head="values", **fields)
    with torch.no_grad():
        judge.model.lm_head.weight.fill_(0.05)
    return {"logprobs": engine_of(model, **fields), "values": judge}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return engines(str(tmp_path_factory.mktemp("alone")), "alone")


def gradient_of(
    engine: TrainingEngine, loss: SequenceLoss, cut: str, *, pairs: bool = False
) -> tuple[Any, float, Any]:
    """(gradient of the mean over examples, value of the loss, metrics of the step)."""
    fields, calls = (PAIRWISE if pairs else CUTS)[cut]
    cut_by(engine, **fields)
    engine.optimizers.zero_grad()
    metrics = (accumulate_pairs if pairs else accumulate)(engine, loss, calls)
    count = loss.count(example(loss)[1])
    gradients = {name: grad / count for name, grad in gradients_of(engine).items()}
    return gradients, metrics["loss/mean"], engine.optim_step(denominator=count)


@pytest.mark.parametrize("name", cases(LOSSES, ["DPO", "SimPO", "reward model"]))
def test_gradient_is_that_of_the_whole_however_the_batch_is_cut(alone, name):
    loss = LOSSES[name].build()
    engine = alone[loss.head]
    wanted, value = direct(weights_of(engine), loss)
    norm = torch.cat([gradient.flatten() for gradient in wanted.values()]).norm().item()
    assert norm > 1e-3
    wrong = {}
    of_pairs = [] if loss.is_unpaired else [(cut, True) for cut in PAIRWISE]
    for cut, pairs in [*((cut, False) for cut in CUTS), *of_pairs]:
        gradients, own_value, step = gradient_of(engine, loss, cut, pairs=pairs)
        errors = relative_error(gradients, wanted), worst_error(gradients, wanted)
        if not (
            own_value == pytest.approx(value, rel=1e-6)
            and errors[0] <= 1e-6
            and errors[1] <= 4e-6
            and step["trainer/grad_norm"] == pytest.approx(norm, rel=1e-6)
        ):
            wrong[cut, pairs] = own_value, errors, step["trainer/grad_norm"]
    assert wrong == {}, (value, norm)


def in_layout(sizes: str, layout: str, folder: str, cuts: list[str]) -> dict[Any, Any]:
    """Gradient and value of each loss and cut, on a rank of its own."""
    own = engines(folder, layout, sizes)
    losses = {name: config.build() for name, config in LOSSES.items()}
    ways = [(cut, False) for cut in cuts] + [("two calls", True)]
    return {
        (name, cut): gradient_of(own[loss.head], loss, cut, pairs=pairs)[:2]
        for name, loss in losses.items()
        for cut, pairs in ways
        if not (pairs and loss.is_unpaired)
    }


def wanted_of(sizes: str, folder: str) -> dict[str, Any]:
    """Gradient and value of each loss, from the weights of one rank alone, on that rank."""
    alone = engines(folder, "alone", sizes)
    weights = {head: weights_of(engine) for head, engine in alone.items()}
    losses = {name: config.build() for name, config in LOSSES.items()}
    return {name: direct(weights[loss.head], loss) for name, loss in losses.items()}


@pytest.mark.parametrize(
    ("sizes", "layout", "cuts"),
    [
        ("experts", "ep2", ["each pair in two calls"]),
        *(long(*pair, [*CUTS]) for pair in PAIRS),
    ],
)
def test_gradient_does_not_depend_on_the_layout(sizes, layout, cuts, tmp_path):
    """The two sequences of some pair are on different ranks."""
    batch, _, _ = example(DPOLoss.Config().build())
    parts = batch.shares(2)
    assert any((row ^ 1) in parts[1] for row in parts[0])
    (wanted,) = on_ranks(1, wanted_of, sizes, str(tmp_path / "alone"))
    ranks = LAYOUTS[layout].ranks
    for answer in on_ranks(ranks, in_layout, sizes, layout, str(tmp_path), cuts, deadline=400.0):
        assert len(answer) == len(LOSSES) * (len(cuts) + 1) - 1
        for (name, cut), (gradients, value) in answer.items():
            gradient, expected = wanted[name]
            assert worst_error(gradients, gradient) <= 1e-5, (name, cut)
            assert value == pytest.approx(expected, rel=1e-5), (name, cut)


@pytest.mark.parametrize("name", ["DPO", "reward model"])
def test_training_starts_at_ln_2_and_learns_the_chosen_answers(folder, name):
    loss = {"DPO": DPOLoss, "reward model": BradleyTerryLoss}[name].Config().build()
    engine = engine_of(MODELS["tied_fused"], folder=folder, lr=1e-2, steps=30, head=loss.head)
    batch = score_batch(ROWS, loss)
    labels = Labels.pairs(3)
    reference = scores_of(engine, batch, loss.head) if loss.needs_reference else None
    linear = LinearLoss.Config(head=loss.head).build()
    rows = []
    for _ in range(12):
        scores = scores_of(engine, batch, loss.head)
        values, _, metrics = coefficients(loss, scores, reference, labels)
        engine.forward_backward(with_coefficients(batch, values), linear)
        rows.append(engine.optim_step(denominator=loss.count(labels)) | metrics)
    assert rows[0]["loss/mean"] == pytest.approx(math.log(2), rel=1e-12)
    assert rows[-1]["loss/mean"] < 0.3
    assert rows[-1]["rewards/accuracy"] == 1
    assert rows[-1]["trainer/weight"] == 3
    if loss.needs_reference:
        assert rows[-1]["rewards/chosen"] > 0 > rows[-1]["rewards/rejected"]
