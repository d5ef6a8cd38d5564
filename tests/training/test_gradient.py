"""One gradient (C1): a float64 forward of each sequence by itself says what it is, however the batch is cut."""

import dataclasses

import pytest
import torch

from rl.algorithms.losses import PolicyLoss
from tests.training.reference import loss_sum, of_scene, per_token, relative_error, worst_error
from tests.training.scenes import (
    CUTS,
    MODELS,
    TEMPERATURE,
    accumulate,
    engine_of,
    gradients_of,
    ragged_batch,
    weights_of,
)

DAPO = {"clip": (0.2, 0.28), "entropy_coef": 0.05}


def reference_gradient(weights, batch, **loss):
    model = of_scene(weights)
    total = loss_sum(model, batch, temperature=TEMPERATURE, **loss)
    total.backward()
    return {name: weight.grad for name, weight in model.weights.items()}, total.item()


def whole_batch(cut: str):
    return ragged_batch().select([3]) if cut == "one row" else ragged_batch()


@pytest.mark.parametrize("cut", CUTS)
def test_gradient_is_the_whole_batchs_however_it_is_cut(alone, cut):
    batch, played = whole_batch(cut), alone["cuts"][cut]
    wanted, _ = reference_gradient(alone["weights"], batch, **DAPO)
    assert relative_error(played["gradients"], wanted) <= 1e-6
    assert worst_error(played["gradients"], wanted) <= 3e-6  # float32 rounding in the smallest, the norms of q and k


@pytest.mark.parametrize("cut", CUTS)
def test_optim_step_divides_once_by_the_weight_of_all_calls(alone, cut):
    batch, step = whole_batch(cut), alone["cuts"][cut]["step"]
    wanted, _ = reference_gradient(alone["weights"], batch, **DAPO)
    norm = torch.cat([gradient.flatten() for gradient in wanted.values()]).norm().item()
    weight = batch.weights.double().sum().item()
    assert step["trainer/weight"] == pytest.approx(weight, rel=1e-12)
    assert step["trainer/grad_norm"] == pytest.approx(norm / weight, rel=1e-6)


@pytest.mark.parametrize("cut", ["one by one", "all at once", "one row"])
def test_loss_mean_is_the_weighted_mean(alone, cut):
    batch = whole_batch(cut)
    _, total = reference_gradient(alone["weights"], batch, **DAPO)
    (metrics,) = alone["cuts"][cut]["metrics"]
    assert metrics["loss/mean"] == pytest.approx(total / batch.weights.double().sum().item(), rel=1e-6)


def test_token_metrics_are_over_the_tokens_that_have_weight(alone):
    batch, model = ragged_batch(), of_scene(alone["weights"])
    ratios, entropies, sizes = [], [], batch.lengths.tolist()
    rows = zip(
        *(c.split(sizes) for c in (batch.tokens, batch.weights, batch.columns["behaviour_logprobs"])), strict=True
    )
    for tokens, weights, behaviour in rows:
        logprobs, entropy = per_token(model, tokens.tolist(), TEMPERATURE)
        ratios.append((logprobs - behaviour[1:]).exp()[weights[1:] > 0])
        entropies.append(entropy[weights[1:] > 0])
    ratio, entropy = torch.cat(ratios), torch.cat(entropies)
    for cut in ("one by one", "all at once"):
        (metrics,) = alone["cuts"][cut]["metrics"]
        assert metrics["ratio/max"] == pytest.approx(ratio.max().item(), rel=1e-5)
        assert metrics["ratio/mean"] == pytest.approx(ratio.mean().item(), rel=1e-5)
        assert metrics["entropy/mean"] == pytest.approx(entropy.mean().item(), rel=1e-5)
        assert metrics["ratio/clipped"] == pytest.approx(((ratio < 0.8) | (ratio > 1.28)).double().mean().item())


def test_gradient_flows_through_the_entropy_bonus_alone(model_name, folder):
    batch = ragged_batch()
    batch = dataclasses.replace(batch, columns=batch.columns | {"advantages": torch.zeros(len(batch.tokens))})
    engine = engine_of(MODELS[model_name], folder=folder)
    engine.forward_backward(batch, PolicyLoss.Config(entropy_coef=0.3).build(), temperature=TEMPERATURE)
    wanted, _ = reference_gradient(weights_of(engine), batch, clip=(0.2, 0.2), entropy_coef=0.3)
    assert min(gradient.norm() for gradient in wanted.values()) > 1e-3
    assert relative_error(gradients_of(engine), wanted) <= 1e-6
    assert worst_error(gradients_of(engine), wanted) <= 3e-6


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("micro", [1, 3])
def test_log_probs_and_entropies_come_back_for_the_right_tokens(model_name, folder, temperature, micro):
    batch = ragged_batch((4, 15, 1, 7, 11, 2, 7))
    engine = engine_of(MODELS[model_name], folder=folder, micro_batch_size=micro)
    model = of_scene(weights_of(engine))
    scored = engine.forward(batch, temperature=temperature)
    trained, _ = engine.forward_backward(batch, PolicyLoss.Config().build(), temperature=temperature)
    sizes = batch.lengths.tolist()
    for outputs in (scored, trained):
        for tokens, logprobs, entropy in zip(
            *(values.split(sizes) for values in (batch.tokens, outputs["logprobs"], outputs["entropy"])), strict=True
        ):
            wanted = per_token(model, tokens.tolist(), temperature)
            assert logprobs[0] == entropy[0] == 0
            torch.testing.assert_close(logprobs[1:], wanted[0].float(), atol=1e-5, rtol=0)
            torch.testing.assert_close(entropy[1:], wanted[1].float(), atol=1e-5, rtol=0)


def test_forward_leaves_no_gradient_and_no_weight(folder):
    engine = engine_of(MODELS["tied_fused"], folder=folder)
    engine.forward(ragged_batch())
    assert all(parameter.grad is None for parameter in engine.model.parameters())
    with pytest.raises(RuntimeError, match="no weight"):
        engine.optim_step()


def test_padding_may_pass_the_models_longest_sequence(folder):
    """15 tokens are padded to 16, one more than the model has positions for."""
    engine = engine_of(MODELS["tied_fused"], folder=folder)
    batch = ragged_batch((15,))
    assert accumulate(engine, batch)["step"]["trainer/weight"] > 0
    with pytest.raises(RuntimeError, match="max_valid_pos"):
        engine.forward(ragged_batch((17,)))
