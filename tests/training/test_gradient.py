"""One gradient (C1): however a batch is cut, it is the float64 gradient of each sequence."""

import contextlib
import itertools
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchtitan.config import CompileConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from rl.algorithms.losses import (
    CISPOLoss,
    ClippedLoss,
    CrossEntropyLoss,
    DecoupledLoss,
    DistillationLoss,
    DPPOLoss,
    GSPOLoss,
    ImportanceSamplingLoss,
    grpo,
)
from rl.algorithms.ratio_losses import GMPOLoss, SAPOLoss
from rl.training import attention, sharded_model
from rl.training.packing import MicroBatchLimits
from tests.kit.batches import ragged_batch, with_experts, with_prompts
from tests.kit.reference import (
    loss_sum,
    of_scene,
    per_token,
    relative_error,
    worst_error,
)
from tests.kit.scenes import (
    BY_SEQUENCE,
    CLAMPED,
    CUTS,
    EXPERTS,
    KINDS,
    LAID_OUT,
    LOSS,
    MODELS,
    TEMPERATURE,
    TIED_FUSED,
    accumulate,
    cut_by,
    engine_of,
    gradients_of,
    unequal,
    weights_of,
)
from tests.kit.tables import long


def reference_gradient(weights, loss, *batches, **options):
    """(gradient of the batches' summed loss, the sum, their weight)."""
    model = of_scene(weights, **options)
    total = sum(loss_sum(model, batch, loss, temperature=TEMPERATURE) for batch in batches)
    total.backward()
    weight = sum(batch.loss_weights.double().sum().item() for batch in batches)
    return {name: weight.grad for name, weight in model.weights.items()}, total.item(), weight


def reference_of(alone, cut: str):
    """Return ``reference_gradient`` of a cut, computed once for equal batches and losses."""
    batches, loss = CUTS[cut].batches, CUTS[cut].loss
    found = alone.setdefault("references", {})
    key = (id(loss), *map(id, batches))
    if key not in found:
        found[key] = reference_gradient(alone["weights"], loss, *batches)
    return found[key]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_that_stay_gathered_have_the_bits_of_those_that_do_not(folder, dtype):
    """Gradients of three micro-batches are added in float32."""
    found = []
    for kept in (True, False):
        with mock.patch.object(sharded_model, "keeps_gathered", lambda *_, kept=kept: kept):
            engine = engine_of(TIED_FUSED, folder=folder, dtype=dtype)
        found.append(accumulate(engine, ragged_batch())["gradients"])
    assert unequal(*found) == []


def test_gradient_is_the_whole_batchs_however_it_is_cut(alone):
    errors = {}
    for cut in CUTS:
        wanted, *_ = reference_of(alone, cut)
        gradients = alone["cuts"][cut]["gradients"]
        errors[cut] = relative_error(gradients, wanted), worst_error(gradients, wanted)
    # float32 rounding in the smallest, the norms of q and k
    assert {c: e for c, e in errors.items() if not (e[0] <= 1e-6 and e[1] <= 4e-6)} == {}


def test_optim_step_divides_once_by_the_weight_of_all_calls(alone):
    found = {}
    expected = {}
    for cut in CUTS:
        wanted, _, weight = reference_of(alone, cut)
        step = alone["cuts"][cut]["step"]
        norm = torch.cat([gradient.flatten() for gradient in wanted.values()]).norm().item()
        found[cut] = step["trainer/weight"], step["trainer/grad_norm"]
        expected[cut] = pytest.approx(weight, rel=1e-12), pytest.approx(norm / weight, rel=1e-6)
    assert found == expected


def test_the_metrics_of_a_step_are_those_of_all_its_calls_together(alone):
    for cut, played in alone["cuts"].items():
        step = played["step"]
        _, total, weight = reference_of(alone, cut)
        # float32 sums of terms near 1 that nearly cancel
        found = step["loss/mean"] + step.get("experts/balance_loss", 0.0)
        assert found == pytest.approx(total / weight, rel=1e-6, abs=1e-7), cut
        if len(played["metrics"]) == 1:
            assert step.items() >= played["metrics"][0].items(), cut


@pytest.mark.parametrize("cut", ["by two", "two calls"])
def test_metrics_of_every_reduction_are_exact(alone, cut):
    batch = ragged_batch()
    model = of_scene(alone["weights"])
    sizes = batch.lengths.tolist()
    rows = [per_token(model, row.tolist(), TEMPERATURE)[1] for row in batch.tokens.split(sizes)]
    starts = [torch.zeros(1, dtype=torch.float64)] * len(rows)
    pairs = zip(starts, rows, strict=True)
    entropy = torch.cat([part for pair in pairs for part in pair])[batch.loss_mask].detach()
    weights = (batch.columns["advantages"] - 0.5).clamp(min=0.0).double()[batch.loss_mask]
    assert 1 < weights.count_nonzero() < len(weights)
    step = alone["cuts"][cut]["step"]
    for name, own in (("plain", torch.ones_like(weights)), ("weighted", weights)):
        mean = (entropy * own).sum() / own.sum()
        expected = {
            "mean": mean,
            "max": entropy[own > 0].max(),
            "min": entropy[own > 0].min(),
            "sum": (entropy * own).sum(),
            "std": ((own * (entropy - mean).square()).sum() / own.sum()).sqrt(),
        }
        for rule, value in expected.items():
            assert step[f"{name}/{rule}"] == pytest.approx(float(value), rel=1e-5), (name, rule)


@pytest.fixture(scope="module", params=MODELS)
def engine(request, tmp_path_factory):
    """One engine for all that leaves its weights alone, and those weights."""
    engine = engine_of(MODELS[request.param], folder=str(tmp_path_factory.mktemp("engine")))
    return engine, weights_of(engine)


@settings(max_examples=8, derandomize=True)
@given(data=st.data())
def test_any_partition_has_the_gradient_of_the_whole(engine, data):
    check_partition(engine, data)


@pytest.mark.long
@settings(max_examples=40, derandomize=True)
@given(data=st.data())
def test_any_of_many_partitions_has_the_gradient_of_the_whole(engine, data):
    check_partition(engine, data)


def check_partition(engine, data) -> None:
    lengths = data.draw(st.lists(st.integers(1, 15), min_size=1, max_size=7))
    # nine tokens have some that count
    batch = ragged_batch((*lengths, 9), seed=data.draw(st.integers(0, 9)))
    prompts = data.draw(st.none() | st.lists(st.integers(0, 2), min_size=len(batch)))
    if prompts is not None:
        batch = with_prompts(batch, prompts[: len(batch)])
    if data.draw(st.booleans()):
        batch = with_experts(batch)
    order = data.draw(st.permutations(range(len(batch))))
    loss = data.draw(st.sampled_from([LOSS, BY_SEQUENCE]))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(order) - 1))))
    calls = [order[a:b] for a, b in itertools.pairwise([0, *cuts, len(order)])]
    cut_by(
        engine[0],
        micro_batch_size=data.draw(st.integers(1, 8)),
        micro_batch_tokens=data.draw(st.none() | st.integers(14, 60)),
        packing=prompts is not None or data.draw(st.booleans()),
        prompt_sharing=1 if prompts is None else data.draw(st.integers(1, 5)),
    )
    engine, weights = engine
    engine.optimizers.zero_grad()
    masked = mock.patch.object(attention, "computes_documents", lambda *_: False)
    with masked if data.draw(st.booleans()) else contextlib.nullcontext():
        for rows in calls:
            engine.forward_backward(batch.select(rows), loss.build(), temperature=TEMPERATURE)
    wanted, *_ = reference_gradient(weights, loss, batch)
    assert min(gradient.norm() for gradient in wanted.values()) > 1e-3
    assert relative_error(gradients_of(engine), wanted) <= 1e-6
    assert worst_error(gradients_of(engine), wanted) <= 4e-6


LOSSES = {
    "decoupled": DecoupledLoss.Config(behaviour_cap=1.05, kl_coef=0.1),
    "dual clip": ClippedLoss.Config(dual_clip=1.5, kl_coef=0.1, kl_estimator="k2"),
    "GSPO": GSPOLoss.Config(clip_low=0.25, clip_high=0.25, kl_coef=0.1),
    "GSPO by token": GSPOLoss.Config(clip_low=0.25, clip_high=0.25, token_level=True),
    "CISPO": CISPOLoss.Config(clip_low=0.2, clip_high=0.2, entropy_coef=0.05),
    "DPPO": DPPOLoss.Config(threshold=0.02),
    "SAPO": SAPOLoss.Config(),
    "GMPO": GMPOLoss.Config(clip_low=0.1, clip_high=0.1),
    "importance sampling": ImportanceSamplingLoss.Config(),
    "cross-entropy": CrossEntropyLoss.Config(),
    "distillation": DistillationLoss.Config(entropy_coef=0.05),
}


OTHER_MODELS = [long(name) for name in MODELS if name != "experts"]


@pytest.mark.parametrize("engine", ["experts", *OTHER_MODELS], indirect=True)
@pytest.mark.parametrize("corrected", [False, True], ids=["plain", "corrected"])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_has_the_gradient_of_one_sequence_at_a_time(engine, loss, corrected):
    (engine, weights) = engine
    batch = ragged_batch(seed=4)
    config = LOSSES[loss]
    draw = torch.Generator().manual_seed(5)
    count = len(batch.tokens)
    near = batch.columns["behaviour_logprobs"] + 0.1 * torch.randn(count, generator=draw)
    batch.columns["teacher_logprobs"] = torch.randn(count, generator=draw) * 0.3 - 3.4
    if corrected:
        weighed = torch.rand(count, generator=draw) * 2
        batch.columns.update(proximal_logprobs=near, correction=weighed)
    if config.needs_proximal:
        batch.columns["proximal_logprobs"] = near
    model = of_scene(weights)
    loss_sum(model, batch, config, temperature=TEMPERATURE).backward()
    wanted = {name: weight.grad for name, weight in model.weights.items()}
    for calls, cut in (
        ([[0, 1, 2, 3, 4]], {"micro_batch_size": 5}),
        ([[3, 0], [1, 2, 4]], {"packing": False}),
    ):
        cut_by(engine, **cut)
        engine.optimizers.zero_grad()
        for rows in calls:
            engine.forward_backward(batch.select(rows), config.build(), temperature=TEMPERATURE)
        assert relative_error(gradients_of(engine), wanted) <= 1e-6


def test_sinks_windows_and_clamped_experts_have_the_gradient_of_one_sequence_at_a_time(folder):
    engine = engine_of(CLAMPED, folder=folder, lr=0.0)
    weights = weights_of(engine)
    for cut in KINDS:
        batches, loss = CUTS[cut].batches, CUTS[cut].loss
        options = {"windows": (8, 0), "eps": 1e-5}
        wanted, *_ = reference_gradient(weights, loss, *batches, **options)
        assert wanted["layers.0.attention.sinks"].norm() > 1e-3
        cut_by(engine, **CUTS[cut].fields)
        gradients = accumulate(engine, *batches, loss=loss)["gradients"]
        assert relative_error(gradients, wanted) <= 1e-6, cut
        assert worst_error(gradients, wanted) <= 4e-6, cut


def test_the_padding_of_compiled_rows_does_not_change_the_gradient(folder, monkeypatch):
    """Rows of 256 cells have at most 61 that are not padding."""
    engine = engine_of(EXPERTS, folder=folder, lr=0.0)
    found = {}
    for kind in ("dense", "flex"):
        monkeypatch.setattr(
            "rl.training.engine.micro_batch_limits",
            lambda config, *_, kind=kind: MicroBatchLimits.of(config, kind),
        )
        for cut in KINDS:
            cut_by(engine, **CUTS[cut].fields)
            played = accumulate(engine, *CUTS[cut].batches, loss=CUTS[cut].loss)
            found[kind, cut] = played["gradients"]
    for cut in KINDS:
        padded, exact = found["flex", cut], found["dense", cut]
        assert relative_error(padded, exact) <= 1e-6, cut
        assert worst_error(padded, exact) <= 4e-6, cut


COMPUTE = {
    "full AC": {"activation_checkpoint": FullAC.Config()},
    "selective AC": {"activation_checkpoint": SelectiveAC.Config()},
    "compile": {"compile": CompileConfig(enable=True, backend="aot_eager")},
    "chunked logits": {"logits_mib": 0},
}


@pytest.mark.parametrize(
    ("model", "how"),
    [
        *(("tied_fused", how) for how in COMPUTE if how != "compile"),
        long("tied_fused", "compile"),
        *itertools.product(("experts", "hybrid"), ("full AC", "selective AC")),
    ],
)
def test_gradient_does_not_depend_on_compute_options(folder, model, how):
    """Rows have three lengths, so that code compiled for one length must serve the others."""
    one, other = (
        engine_of(LAID_OUT[model], folder=folder, **fields) for fields in ({}, COMPUTE[how])
    )
    for seed, lengths in enumerate([(4, 15, 1, 7, 11), (3, 9), (12, 12, 12)]):
        for engine in (one, other):
            batch = with_experts(ragged_batch(lengths, seed=seed))
            engine.forward_backward(batch, LOSS.build())
    assert relative_error(gradients_of(other), gradients_of(one)) <= 1e-6


@pytest.mark.parametrize("model", ["tied_fused", "experts"])
def test_bfloat16_computes_near_float32_on_float32_weights(folder, model):
    exact, mixed = (
        engine_of(MODELS[model], folder=folder, dtype=dtype) for dtype in ("float32", "bfloat16")
    )
    batch = with_experts(ragged_batch())
    for engine in (exact, mixed):
        engine.forward_backward(batch, LOSS.build(), temperature=TEMPERATURE)
    assert (
        {p.dtype for p in mixed.model.parameters()}
        == {g.dtype for g in gradients_of(mixed).values()}
        == {torch.float32}
    )
    assert 1e-4 < relative_error(gradients_of(mixed), gradients_of(exact)) <= 0.05


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("micro", [1, 3])
def test_log_probs_and_entropies_come_back_for_the_right_tokens(
    model_name, folder, temperature, micro
):
    batch = ragged_batch((4, 15, 1, 7, 11, 2, 7))
    engine = engine_of(MODELS[model_name], folder=folder, micro_batch_size=micro)
    model = of_scene(weights_of(engine))
    scored = engine.forward(batch, temperature=temperature)
    trained, _ = engine.forward_backward(batch, grpo().build(), temperature=temperature)
    sizes = batch.lengths.tolist()
    sequences = [
        per_token(model, tokens.tolist(), temperature) for tokens in batch.tokens.split(sizes)
    ]
    for name, of_sequences in zip(
        ("logprobs", "entropy"), zip(*sequences, strict=True), strict=True
    ):
        wanted = torch.cat([torch.cat([torch.zeros(1), each.float()]) for each in of_sequences])
        torch.testing.assert_close(scored[name], wanted, atol=1e-5, rtol=0)
        weighted = wanted * batch.loss_mask
        torch.testing.assert_close(trained[name], weighted, atol=1e-5, rtol=0)
        firsts = batch.lengths.cumsum(0) - batch.lengths
        assert not scored[name][firsts].any() and not trained[name][~batch.loss_mask].any()


def test_forward_leaves_no_gradient_and_no_weight(folder):
    engine = engine_of(MODELS["tied_fused"], folder=folder)
    engine.forward(ragged_batch())
    assert all(parameter.grad is None for parameter in engine.model.parameters())
    with pytest.raises(RuntimeError, match="no weight"):
        engine.optim_step()


def test_padding_may_exceed_the_maximum_sequence_length(folder):
    """15 tokens are padded to 16, one more than the model has positions for."""
    engine = engine_of(MODELS["tied_fused"], folder=folder)
    batch = ragged_batch((15,))
    assert accumulate(engine, batch)["step"]["trainer/weight"] > 0
    with pytest.raises(RuntimeError, match="max_valid_pos"):
        engine.forward(ragged_batch((17,)))
