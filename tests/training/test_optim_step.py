"""optim_step clips, steps, zeroes and counts; a non-finite gradient changes nothing but a count."""

import dataclasses

import pytest
import torch

from rl.types import Batch
from tests.training.scenes import (
    LOSS,
    TEMPERATURE,
    TIED_FUSED,
    broken,
    engine_of,
    learn,
    ragged_batch,
    weights_of,
    whole,
)


@pytest.fixture
def build(folder):
    return lambda **config: engine_of(TIED_FUSED, folder=folder, **config)


def moments(engine) -> list[torch.Tensor]:
    """What Adam remembers of the gradients: after one step, a tenth of the gradient it was given."""
    (optimizer,) = engine.optimizers
    return [whole(optimizer.state[p]["exp_avg"]) for p in engine.model.parameters()]


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_gradients_longer_than_max_norm_are_shortened_to_it(build, max_norm):
    engine = build(max_norm=max_norm)
    norm = learn(engine, ragged_batch())["trainer/grad_norm"]
    assert 0.5 < norm < 1e6
    taken = 10 * torch.cat([moment.flatten() for moment in moments(engine)]).norm().item()
    assert taken == pytest.approx(min(norm, max_norm), rel=1e-4)


@pytest.mark.parametrize("row", [0, 4])
def test_a_skipped_step_leaves_no_trace(build, row):
    """Weights, optimizer state, schedule and accumulated gradient are those of a run without it."""
    with_it, without = build(warmup=4), build(warmup=4)
    for engine in (with_it, without):
        learn(engine, ragged_batch(seed=1))
    with_it.forward_backward(ragged_batch(seed=9), LOSS.build(), temperature=TEMPERATURE)
    skipped = learn(with_it, broken(ragged_batch(), row))
    assert not torch.tensor(skipped["trainer/grad_norm"]).isfinite()
    assert (skipped["version"], skipped["trainer/skipped_steps"]) == (1, 1)
    last = [learn(engine, ragged_batch(seed=2)) for engine in (with_it, without)]
    assert last[0] == last[1] | {"trainer/skipped_steps": 1.0}
    assert all(map(torch.equal, moments(with_it), moments(without)))
    weights = weights_of(without)
    assert all(torch.equal(weight, weights[name]) for name, weight in weights_of(with_it).items())


def test_the_learning_rate_follows_its_schedule_by_policy_version(build):
    engine = build(warmup=4)
    steps = [learn(engine, ragged_batch(seed=seed)) for seed in range(6)]
    rates = [step["trainer/lr/AdamW"] for step in steps]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])
    assert [step["version"] for step in steps] == [1, 2, 3, 4, 5, 6]


def test_the_loss_falls(build):
    engine = build()
    losses = [learn(engine, ragged_batch())["loss/mean"] for _ in range(10)]
    assert losses[-1] < losses[0] - 0.1


def test_a_step_without_weight_is_refused(build):
    engine = build()
    batch = ragged_batch()
    nothing = dataclasses.replace(batch, weights=torch.zeros_like(batch.weights))
    with pytest.raises(RuntimeError, match="no weight was accumulated; call forward_backward"):
        engine.optim_step()
    _, metrics = engine.forward_backward(nothing, LOSS.build())
    assert metrics["loss/mean"] == 0.0
    with pytest.raises(RuntimeError, match="no weight was accumulated"):
        engine.optim_step()
    learn(engine, batch)
    assert engine.version == 1


def test_an_empty_batch_is_refused(build):
    empty = Batch(tokens=torch.zeros(0).long(), lengths=torch.zeros(0).long(), weights=torch.zeros(0))
    with pytest.raises(ValueError, match="the batch is empty"):
        build().forward(empty)
