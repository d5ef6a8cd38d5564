"""optim_step clips, steps, zeroes and counts; a non-finite gradient changes nothing but a count."""

import dataclasses
import math

import pytest
import torch

from rl.algorithms.batch import reduced
from rl.algorithms.losses import Metric
from rl.algorithms.tokens import Tokens
from rl.errors import RunError
from rl.model.digest import ShardDigests, digests
from rl.types import Batch
from tests.kit.batches import broken, ragged_batch
from tests.kit.layouts import LAYOUTS
from tests.kit.ranks import on_ranks
from tests.kit.reference import relative_error
from tests.kit.scenes import (
    LOSS,
    TEMPERATURE,
    TIED_FUSED,
    engine_of,
    gradients_of,
    learn,
    share,
    unequal,
    weights_of,
    whole,
)


@pytest.fixture
def build(folder):
    return lambda **config: engine_of(TIED_FUSED, folder=folder, **config)


def moments(engine) -> list[torch.Tensor]:
    """Return Adam's first moments: after one step, a tenth of the gradient."""
    (optimizer,) = engine.optimizers
    return [whole(optimizer.state[p]["exp_avg"]) for p in engine.model.parameters()]


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_gradients_longer_than_max_norm_are_shortened_to_it(build, max_norm):
    engine = build(max_norm=max_norm)
    norm = learn(engine, ragged_batch())["trainer/grad_norm"]
    assert 0.5 < norm < 1e6
    taken = 10 * torch.cat([moment.flatten() for moment in moments(engine)]).norm().item()
    assert taken == pytest.approx(min(norm, max_norm), rel=1e-4)


@pytest.mark.parametrize(("lr", "updates"), [(1e-9, 0.0), (1e-1, 1.0)])
def test_an_update_that_bfloat16_parameters_round_away_does_not_count(build, lr, updates):
    engine = build(decay=0.0)
    engine.model.bfloat16()
    before = weights_of(engine)
    assert learn(engine, ragged_batch(), lr=lr)["trainer/updates"] == updates
    assert bool(unequal(before, weights_of(engine))) == bool(updates)


@pytest.mark.parametrize("row", [0, 4])
def test_a_skipped_step_leaves_no_trace(build, row):
    """Weights, optimizer state, schedule and accumulated gradient are those of a run without it."""
    with_it = build(warmup=4)
    without = build(warmup=4)
    for engine in (with_it, without):
        learn(engine, ragged_batch(seed=1))
    with_it.forward_backward(ragged_batch(seed=9), LOSS.build(), temperature=TEMPERATURE)
    skipped = learn(with_it, broken(ragged_batch(), row))
    assert not torch.tensor(skipped["trainer/grad_norm"]).isfinite()
    assert (skipped["version"], skipped["trainer/skipped_steps"]) == (1, 1)
    last = [learn(engine, ragged_batch(seed=2)) for engine in (with_it, without)]
    assert last[0] == last[1] | {"trainer/skipped_steps": 1.0}
    assert all(map(torch.equal, moments(with_it), moments(without)))
    assert unequal(weights_of(with_it), weights_of(without)) == []


def test_the_learning_rate_follows_its_schedule_by_policy_version(build):
    engine = build(warmup=4)
    steps = [learn(engine, ragged_batch(seed=seed)) for seed in range(6)]
    rates = [step["trainer/lr/AdamW"] for step in steps]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])
    assert [step["version"] for step in steps] == [1, 2, 3, 4, 5, 6]


def test_a_given_denominator_replaces_the_accumulated_weight(build):
    """Training can begin before the batch is complete."""
    at_once = build(max_norm=1e6)
    in_parts = build(max_norm=1e6)
    batch = ragged_batch()
    norm = learn(at_once, batch)["trainer/grad_norm"]
    for rows in ([0, 1], [2, 3, 4]):
        in_parts.forward_backward(batch.select(rows), LOSS.build(), temperature=TEMPERATURE)
    step = in_parts.optim_step(denominator=2 * float(batch.loss_weights.sum()))
    assert step["trainer/grad_norm"] == pytest.approx(norm / 2, rel=1e-6)


def test_a_fixed_length_divides_by_the_number_of_sequences_of_all_calls(build):
    given = build(max_norm=1e6)
    counted = build(max_norm=1e6)
    batch = reduced(ragged_batch(), "fixed_length", 10)
    plain = dataclasses.replace(batch, denominators=None)
    given.forward_backward(plain, LOSS.build(), temperature=TEMPERATURE)
    for rows in ([0, 1], [2, 3, 4]):
        counted.forward_backward(batch.select(rows), LOSS.build(), temperature=TEMPERATURE)
    steps = [given.optim_step(denominator=5.0), counted.optim_step()]
    assert [step["trainer/weight"] for step in steps] == [5.0, 5.0]
    assert steps[0]["trainer/grad_norm"] == pytest.approx(steps[1]["trainer/grad_norm"], rel=1e-6)


def test_a_weight_scales_the_gradient_and_not_the_denominator(build):
    plain = build()
    scaled = build()
    plain.forward_backward(ragged_batch(), LOSS.build())
    scaled.forward_backward(ragged_batch(), LOSS.build(), weight=0.25)
    scaled.forward_backward(ragged_batch(), LOSS.build(), weight=2.0)
    wanted = {name: 2.25 * gradient for name, gradient in gradients_of(plain).items()}
    assert relative_error(gradients_of(scaled), wanted) <= 1e-6
    weight = plain.optim_step()["trainer/weight"]
    assert scaled.optim_step()["trainer/weight"] == 2 * weight


def test_options_of_a_step_apply_only_to_that_step(build):
    engine = build(warmup=4)
    usual = build(warmup=4)
    for each, options in (
        (engine, {"lr": 0.0, "betas": (0.0, 0.0), "max_norm": 1e-3}),
        (usual, {}),
    ):
        before = weights_of(each)
        each.forward_backward(ragged_batch(), LOSS.build())
        step = each.optim_step(**options)
        assert bool(unequal(before, weights_of(each))) == (each is usual)
    assert step["trainer/lr/AdamW"] == 0.25e-3
    taken = torch.cat([moment.flatten() for moment in moments(engine)]).norm()
    assert taken == pytest.approx(1e-3, rel=1e-4)  # beta 0 remembers the whole gradient, clipped
    for optimizer, untouched in zip(engine.optimizers, usual.optimizers, strict=True):
        (group,), (wanted,) = optimizer.param_groups, untouched.param_groups
        assert group | {"params": None} == wanted | {"params": None}


def test_more_skipped_steps_in_a_row_than_allowed_end_the_run(build):
    engine = build(max_skipped_steps=1)
    learn(engine, broken(ragged_batch(), 0))
    learn(engine, ragged_batch())
    learn(engine, broken(ragged_batch(), 0))  # one in a row again
    message = r"2 optimizer steps in a row .* trainer.max_skipped_steps=1: lower"
    with pytest.raises(RunError, match=message):
        learn(engine, broken(ragged_batch(), 0))
    assert (engine.version, engine.skipped_steps) == (1, 3)


def test_a_forward_between_the_gradient_and_its_step_does_not_keep_old_weights(build):
    """FSDP leaves weights gathered after a forward pass that no backward follows."""
    with_it = build(lr=0.1)
    without = build(lr=0.1)
    for engine in (with_it, without):
        engine.forward_backward(ragged_batch(), LOSS.build())
        if engine is with_it:
            engine.forward(ragged_batch())
        engine.optim_step()
    found, wanted = (engine.forward(ragged_batch())["logprobs"] for engine in (with_it, without))
    assert torch.equal(found, wanted)


def test_steps_are_those_of_adamw_with_options_of_their_own_also_without_gradients(build):
    engine = build(max_norm=1e-9)
    parameters = [*engine.model.parameters()]
    own = [each.detach().clone().requires_grad_() for each in parameters]
    wanted = torch.optim.AdamW(own)
    for step in range(6):
        options = {"lr": 1e-2 / (step + 1), "betas": (0.5 + step / 20, 0.95), "eps": 10.0**-step}
        options["weight_decay"] = step / 10
        if step not in (2, 3):
            engine.forward_backward(ragged_batch(seed=step), LOSS.build())
        for mine, theirs in zip(parameters, own, strict=True):
            theirs.grad = torch.zeros_like(theirs) if mine.grad is None else mine.grad.clone()
        engine.optim_step(denominator=1.0, max_norm=math.inf, **options)
        wanted.param_groups[0].update(options)
        wanted.step()
        for mine, theirs in zip(parameters, own, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-7, rtol=1e-6)
    assert engine.version == 6


@pytest.mark.parametrize("layout", ["fsdp2", "tp2"])
def test_ranks_take_a_step_without_gradients_together(folder, layout):
    for answer in on_ranks(2, decayed, folder, layout):
        assert answer == {"trainer/grad_norm": 0.0, "moved": True, "finite": True}


def decayed(folder: str, layout: str) -> dict[str, object]:
    """Take a step on gradients and one without, which decays the weights."""
    engine = engine_of(TIED_FUSED, folder=folder, layout=LAYOUTS[layout])
    learn(engine, ragged_batch())
    before = weights_of(engine)
    norm = engine.optim_step(denominator=1.0)["trainer/grad_norm"]
    after = weights_of(engine)
    finite = all(bool(each.isfinite().all()) for each in after.values())
    return {"trainer/grad_norm": norm, "moved": bool(unequal(before, after)), "finite": finite}


def test_no_step_is_taken_past_the_end_of_the_schedule(build):
    engine = build(steps=1)
    learn(engine, ragged_batch())
    before = weights_of(engine)
    message = "the schedule ends after 1 steps; build the engine with more"
    with pytest.raises(RuntimeError, match=message):
        learn(engine, ragged_batch())
    assert engine.version == 1
    assert unequal(before, weights_of(engine)) == []


def test_a_step_without_weight_is_refused(build):
    engine = build()
    batch = ragged_batch()
    nothing = dataclasses.replace(batch, loss_weights=torch.zeros_like(batch.loss_weights))
    with pytest.raises(RuntimeError, match="no weight was accumulated; call forward_backward"):
        engine.optim_step()
    _, metrics = engine.forward_backward(nothing, LOSS.build())
    assert metrics["loss/mean"] == 0.0
    with pytest.raises(RuntimeError, match="no weight was accumulated"):
        engine.optim_step()
    learn(engine, batch)
    assert engine.version == 1


WRONG_LOSSES = {
    "a Tensor": lambda c, v: c,
    "costs that are a float": lambda c, v: (1.0, {}),
    "costs without a gradient": lambda c, v: (c.detach(), {}),
    r"costs of shape \[\] and torch.float32": lambda c, v: (c.mean(), {}),
    r"costs of shape \[\d+, 1\]": lambda c, v: (c[:, None], {}),
    r"costs of shape \[\d+\] and torch.float64": lambda c, v: (c.double(), {}),
    "metrics that are a NoneType": lambda c, v: (c, None),
    "a Tensor as metric 'm', not a Metric reduced by": lambda c, v: (c, {"m": v}),
    "a Metric as metric 'm', not a Metric": lambda c, v: (c, {"m": Metric(v, "median")}),
    r"\[1\] values as metric 'm'": lambda c, v: (c, {"m": Metric(v[:1], "max")}),
    r"\[1\] weights of metric 'm'": lambda c, v: (c, {"m": Metric(v, "std", v[:1])}),
}
"""Wrong results of a loss: functions of right costs and values, by what the error says."""


@pytest.mark.parametrize("wrong", WRONG_LOSSES)
def test_a_loss_that_is_not_per_token_is_refused_by_name(build, wrong):
    def loss(tokens: Tokens):
        return WRONG_LOSSES[wrong](-tokens["logprobs"], tokens["entropy"].detach())

    message = f"the loss function returned {wrong}.*; it must return a pair for these"
    with pytest.raises(RunError, match=message):
        build().forward_backward(ragged_batch(), loss)


def test_updates_counts_steps_that_change_weights(build):
    engine = build()
    learned = learn(engine, ragged_batch())["trainer/updates"]
    skipped = learn(engine, broken(ragged_batch(), 0))["trainer/updates"]
    engine.forward_backward(ragged_batch(), LOSS.build())
    without_rate = engine.optim_step(lr=0.0)["trainer/updates"]
    engine.forward_backward(ragged_batch(), LOSS.build(), weight=0.0)
    without_gradient = engine.optim_step()["trainer/updates"]
    assert (learned, skipped, without_rate, without_gradient) == (1.0, 0.0, 0.0, 0.0)


def test_an_extreme_of_no_token_is_left_out(build):
    batch = ragged_batch()
    stale = dataclasses.replace(
        batch, columns=batch.columns | {"staleness": torch.ones(len(batch.tokens))}
    )
    _, metrics = build().forward_backward(stale, LOSS.build())
    assert "logprob/error_max" not in metrics
    assert metrics["logprob/drift_max"] > 0


def test_operations_are_those_of_torchtitans_formula(build):
    engine = build()
    batch = ragged_batch()
    engine.forward_backward(batch, LOSS.build())
    engine.forward_backward(batch, LOSS.build())
    model = engine.model
    each = [n * model.config.get_nparams_and_flops(model, n)[1] for n in batch.lengths.tolist()]
    each[2] //= 3  # it has no gradient, so that it has a forward pass alone
    assert engine.work.take() == 2 * sum(each) > 0
    assert engine.work.take() == 0


class SecondRaises:
    """A loss that raises at its second micro-batch."""

    def __init__(self):
        self.calls = 0

    def __call__(self, tokens):
        self.calls += 1
        if self.calls == 2:
            raise RunError("the second micro-batch is bad")
        return LOSS.build()(tokens)


def learned_after_a_failure(folder: str, fails: bool, layout: str = "alone") -> ShardDigests:
    """Return this rank's weights after a step. With ``fails``, a call before it raises."""
    engine = engine_of(TIED_FUSED, folder=folder, layout=LAYOUTS[layout])
    batch = share(engine, ragged_batch())
    if fails:
        engine.forward_backward(batch, LOSS.build())
        with pytest.raises(RunError, match="the second micro-batch is bad"):
            engine.forward_backward(batch, SecondRaises())
    learn(engine, ragged_batch())
    return digests(engine.shards().values())


def test_a_call_that_raises_leaves_no_gradient(folder):
    assert learned_after_a_failure(folder, True) == learned_after_a_failure(folder, False)


@pytest.mark.long
def test_a_call_that_raises_leaves_no_gradient_on_replicas(folder):
    """A replica keeps the gradients of all micro-batches but the last until it reduces them."""
    failed, clean = (
        on_ranks(2, learned_after_a_failure, folder, fails, "ddp2") for fails in (True, False)
    )
    assert failed == clean


def test_an_empty_batch_is_refused(build):
    empty = Batch(
        tokens=torch.zeros(0).long(), lengths=torch.zeros(0).long(), loss_weights=torch.zeros(0)
    )
    with pytest.raises(ValueError, match="the batch is empty"):
        build().forward(empty)
