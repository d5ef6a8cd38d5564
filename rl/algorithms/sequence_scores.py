"""Scores of whole sequences, and a per-token loss with the gradient of a loss over the scores.

A score is a weighted sum of a model's output over a sequence's trained tokens. So the gradient of a
loss over scores is the sum over sequences of (derivative with respect to the score) * (gradient of
the score). Each term depends on one sequence only, so the gradient does not depend on how the batch
is split (C1). A step::

    loss = DPOLoss.Config(beta=0.1).build()
    batch = score_batch(batch, loss)
    labels = Labels.pairs(len(batch) // 2)
    outputs, reference = [await session.forward(batch, role=r) for r in ("trainer", "reference")]
    weights, value, metrics = coefficients(
        loss,
        sequence_scores(batch, outputs[loss.head]),
        sequence_scores(batch, reference[loss.head]),
        labels,
    )
    await session.forward_backward(with_coefficients(batch, weights), LinearLoss.Config())
    metrics = await session.optim_step(denominator=loss.count(labels)) | metrics

If one micro-batch has room for both sequences of a pair, one forward pass is enough::

    batch = pair_batch(score_batch(batch, loss), labels, reference)
    await session.forward_backward(batch, LossOfPairs.Config(loss=DPOLoss.Config(beta=0.1)))

A reward model uses ``BradleyTerryLoss``, ``LinearLoss.Config(head="values")``, no reference and a
role of its own. For ``KTOLoss``, the batch of n sequences becomes
``score_batch(with_mismatched(batch, max_tokens=...), loss)`` of 2n, the labels are
``Labels.unpaired(desirable)``, and ``with_coefficients(batch, weights[:n])`` is trained on.
"""

from dataclasses import dataclass, replace

import torch
from torchtitan.config import Configurable

from rl.algorithms.loss_results import LOSS, Metric, PerToken, value_of
from rl.algorithms.sequence_losses import Labels, SequenceLoss
from rl.algorithms.tokens import Tokens, sum_by_sequence, token_weights
from rl.errors import RunError
from rl.metrics import Metrics
from rl.types import Batch, Head

COEFFICIENTS = "coefficients"
"""Column that :class:`LinearLoss` reads."""
REFERENCE, REMAINDER, MARGIN = "reference_score", "reference_remainder", "margin"
"""Columns that :class:`LossOfPairs` reads. The first two add up to a score in float64."""


class LinearLoss(Configurable):
    """Coefficient times log-prob, or times value, of each token: column ``coefficients``.

    Only the gradient has a meaning. The engine reports the value of the loss as ``loss/mean``:
    replace that metric by the metrics of :func:`coefficients`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        head: Head = "logprobs"
        """Output of the model that the scores were computed from."""

    def __init__(self, config: Config):
        self.config = config

    def __call__(self, tokens: Tokens) -> PerToken:
        """Return the cost of each token, [C], and no metrics."""
        return tokens[COEFFICIENTS] * tokens[self.config.head], {}


class LossOfPairs(Configurable):
    """Loss of a batch of :func:`pair_batch`: the gradient and metrics of :func:`coefficients`,
    from the scores of the same forward pass.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        loss: SequenceLoss.Config

    def __init__(self, config: Config):
        self.loss: SequenceLoss = config.loss.build()

    def __call__(self, tokens: Tokens) -> PerToken:
        """Return the coefficient of each token times its output, [C], and metrics of the pairs."""
        loss, output, owner = self.loss, tokens[self.loss.head], tokens["sequence"]
        counts = sum_by_sequence(torch.ones_like(owner), owner, tokens.sequences)
        weights = _weights(counts, loss).to(owner.device)[owner]
        scores = sum_by_sequence(output.detach().double() * weights.double(), owner, len(counts))
        first = counts.cumsum(0) - counts
        reference = None
        if loss.needs_reference:
            reference = tokens[REFERENCE][first].double() + tokens[REMAINDER][first].double()
        labels = Labels.pairs(len(counts) // 2, device=owner.device)
        at = first[labels.chosen]  # the token that has the metrics of a pair
        if MARGIN in tokens:
            labels = replace(labels, margins=tokens[MARGIN][at])
        gradient, metrics = _derivative(loss, scores, reference, labels)
        none = scores.new_zeros(len(owner))
        once = none.index_fill(0, at, 1.0)
        spread = {
            name: Metric(
                none.index_copy(0, at, metric.values.detach().double()), metric.reduction, once
            )
            for name, metric in metrics.items()
        }
        return gradient.float()[owner] * output, spread


def pair_batch(batch: Batch, labels: Labels, reference: torch.Tensor | None) -> Batch:
    """Return ``batch``, a result of :func:`score_batch` whose rows are those of
    :meth:`Labels.pairs`, for :class:`LossOfPairs`.

    ``reference`` are the scores of the reference, [n]. Each sequence counts 1 in the denominator.
    """
    columns = {}
    if reference is not None:
        columns[REFERENCE] = _spread(reference.float(), batch)
        columns[REMAINDER] = _spread((reference - reference.float().double()).float(), batch)
    if labels.margins is not None:
        columns[MARGIN] = _spread(labels.margins.repeat_interleave(2), batch)
    ones = torch.ones(len(batch)).double()
    return replace(batch, columns=columns, denominators=ones, together=2)


def score_batch(batch: Batch, loss: SequenceLoss) -> Batch:
    """Return the sequences of ``batch`` with the loss weights that define the scores of ``loss``.

    The trained tokens are the tokens with a weight above 0 in ``batch``.

    - Log-probs: trained tokens get weight 1, or 1 / (their number in the sequence) if
      ``length_normalized``.
    - Values: each sequence gets one more token, a placeholder, which alone has a weight above 0.
      The value at the placeholder is computed from all tokens before it. The result has n more
      tokens and no columns.

    For log-probs, raises RunError if a sequence has no trained token.
    """
    if loss.head == "values":
        ends = batch.lengths.cumsum(0) + torch.arange(len(batch))
        tokens = batch.tokens.new_zeros(len(batch.tokens) + len(batch))
        is_end = torch.zeros(len(tokens), dtype=torch.bool)
        is_end[ends] = True
        tokens[~is_end] = batch.tokens
        return Batch(tokens=tokens, lengths=batch.lengths + 1, loss_weights=is_end.float())
    counts = sum_by_sequence(batch.loss_mask.long(), batch.owners, len(batch))
    if not counts.all():
        raise RunError(f"sequence {int(counts.argmin())} of the batch has no trained token")
    weights = _spread(_weights(counts, loss), batch)
    return replace(batch, loss_weights=weights.masked_fill(~batch.loss_mask, 0.0))


def sequence_scores(batch: Batch, output: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of ``output``, [T], over each sequence's trained tokens, float64 [n].

    ``batch`` is the result of :func:`score_batch`; ``output`` is an output of ``forward`` on it.
    """
    mask = batch.loss_mask
    weighted = output[mask].double() * batch.loss_weights[mask].double()
    return sum_by_sequence(weighted, batch.owners[mask], len(batch))


def coefficients(
    loss: SequenceLoss, scores: torch.Tensor, reference: torch.Tensor | None, labels: Labels
) -> tuple[torch.Tensor, float, Metrics]:
    """Return the derivative of the summed costs by each score, the mean cost, and metrics.

    ``scores`` and ``reference`` are [n]; the derivative is float64 [n], by autograd in float64.
    The gradient of a step is the gradient of the mean over its examples if ``denominator`` of
    ``optim_step`` is the sum of ``loss.count(labels)`` over the calls of the step.

    Metrics are ``loss/mean``, those of the loss and, for log-probs, ``logps/chosen`` and
    ``logps/rejected``, the means of the scores.
    """
    if loss.count(labels) == 0:
        raise RunError(f"{type(loss).__name__} has no examples to compare")
    gradient, metrics = _derivative(loss, scores, reference, labels)
    entries = {name: value_of(metric) for name, metric in metrics.items() if len(metric.values)}
    return gradient, entries[LOSS].value, Metrics(entries)


def _derivative(
    loss: SequenceLoss, scores: torch.Tensor, reference: torch.Tensor | None, labels: Labels
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """Return the derivative and the metrics of :func:`coefficients`, each with its values."""
    leaf = scores.detach().double().requires_grad_()
    prior = None if reference is None else reference.detach().double()
    if prior is not None and prior.shape != leaf.shape:
        raise RunError(f"{len(leaf)} scores have {len(prior)} of the reference")
    costs, metrics = loss(leaf, prior, labels)
    count = loss.count(labels)
    if costs.shape != (count,):
        raise RunError(
            f"{type(loss).__name__} returned costs of shape {[*costs.shape]} for {count} examples"
        )
    (gradient,) = torch.autograd.grad(costs.sum(), leaf)
    if loss.head == "logprobs":
        metrics = dict(metrics) | {
            "logps/chosen": leaf[labels.chosen],
            "logps/rejected": leaf[labels.rejected],
        }
    return gradient, {
        name: entry if isinstance(entry, Metric) else Metric(entry, "mean")
        for name, entry in {**metrics, LOSS: costs}.items()
    }


def _weights(counts: torch.Tensor, loss: SequenceLoss) -> torch.Tensor:
    """Return the weight in a score of each trained token of sequences with so many, [n]."""
    return token_weights(counts, "sequence_mean" if loss.config.length_normalized else "token_mean")


def with_coefficients(batch: Batch, values: torch.Tensor) -> Batch:
    """Return the first m sequences of ``batch`` with one column, ``coefficients``: each token has
    its sequence's number in ``values`` [m]. Each sequence counts 1 in the denominator.

    ``batch`` is the result of :func:`score_batch`. Sequences after the first m are dropped.
    """
    learned = batch if len(values) == len(batch) else batch.select(range(len(values)))
    columns = {COEFFICIENTS: _spread(values.float(), learned)}
    return replace(learned, columns=columns, denominators=torch.ones(len(learned)).double())


def with_mismatched(batch: Batch, *, max_tokens: int) -> Batch:
    """Return the n sequences of ``batch``, followed by n mismatched sequences.

    Sequence n + i is the prompt of sequence i (the tokens before its first trained token), followed
    by the completion of sequence i + 1, cyclically: arXiv:2402.01306, section 4.1. It is cut off
    after ``max_tokens`` tokens, which must be at least the length of the longest sequence of
    ``batch``. The result has no columns.

    Raises RunError if n is below 2.
    """
    if len(batch) < 2:
        raise RunError("a baseline from mismatched sequences needs at least two sequences")
    sizes = batch.lengths.tolist()
    tokens = batch.tokens.split(sizes)
    weights = batch.loss_weights.split(sizes)
    prompts = [int((weight > 0).int().argmax()) for weight in weights]
    rows = [*tokens]
    row_weights = [*weights]
    for i, prompt in enumerate(prompts):
        other = (i + 1) % len(batch)
        for values, joined in ((tokens, rows), (weights, row_weights)):
            completion = values[other][prompts[other] :]
            joined.append(torch.cat([values[i][:prompt], completion])[:max_tokens])
    return Batch(
        tokens=torch.cat(rows),
        lengths=torch.tensor([len(row) for row in rows]),
        loss_weights=torch.cat(row_weights),
    )


def _spread(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the value of each token's sequence, [T]; ``values`` is [n]."""
    return values.repeat_interleave(batch.lengths)
