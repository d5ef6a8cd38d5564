"""Sequences without a gradient: computed without a backward pass, or not at all."""

import dataclasses

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
    ValueLoss,
    grpo,
)
from rl.algorithms.ratio_losses import GMPOLoss, SAPOLoss
from rl.algorithms.tokens import Tokens
from rl.types import Batch
from tests.kit.batches import ragged_batch
from tests.kit.layouts import LAYOUTS
from tests.kit.ranks import in_layout
from tests.kit.reference import relative_error
from tests.kit.scenes import MODELS, TEMPERATURE, engine_of, gradients_of, share, weights_of
from tests.kit.tables import long

LENGTHS = (9, 12, 5, 7, 11, 6)
IDLE = {
    "some sequences": (1, 2, 4),
    "all sequences": (0, 1, 2, 3, 4, 5),
    "no sequence": (),
    "those of one rank": (0, 3, 4),
}


class UnknownTerm(ClippedLoss):
    """A surrogate of one's own, which declares nothing."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(ClippedLoss.Config):
        pass

    def surrogate(self, tokens):
        loss, metrics = super().surrogate(tokens)
        return loss - 0.1 * tokens["logprobs"], metrics


def batch_with(idle: tuple[int, ...], column: str) -> Batch:
    """Return a batch in which ``column`` is 0 in the sequences ``idle``."""
    batch = ragged_batch(LENGTHS)
    index = batch.token_index(list(idle))
    batch.columns["correction"] = batch.columns["advantages"].abs() + 0.5
    batch.columns["proximal_logprobs"] = batch.columns["behaviour_logprobs"] + 0.1
    values = batch.loss_weights if column == "loss_weights" else batch.columns[column]
    values[index] = 0.0
    return batch


def gradient_and_metrics(engine, batch, loss):
    outputs, metrics = engine.forward_backward(share(engine, batch), loss, temperature=TEMPERATURE)
    found = {name: each.clone() for name, each in gradients_of(engine).items()}
    weight = engine._sums.weight
    engine._forget_gradients()
    return found, outputs, metrics, weight


def compared(model: str, layout: str, folder: str, options: dict) -> list[dict]:
    """Return differences between a step and one in which every sequence has a backward pass."""
    answers = []
    engine = engine_of(MODELS[model], folder=folder, layout=LAYOUTS[layout], **options)
    for how in ("forward", "skip"):
        engine.config.zero_gradient = how
        for case, idle in IDLE.items():
            columns = ("advantages", "correction", "loss_weights")
            for column in columns if case == "some sequences" else columns[:1]:
                batch = batch_with(idle, column)
                loss = grpo(clip_high=10.0).build()
                found, outputs, metrics, weight = gradient_and_metrics(engine, batch, loss)
                whole = gradient_and_metrics(engine, batch, lambda tokens: loss(tokens))  # noqa: B023
                norm = sum(float(each.square().sum()) for each in whole[0].values())
                own = dict(metrics)
                idle_share = own.pop("trainer/zero_gradient")
                wanted = dict(whole[2])
                wanted.pop("trainer/zero_gradient")
                answers.append(
                    {
                        "case": (how, case, column),
                        "error": relative_error(found, whole[0]) if norm else 0.0,
                        "gradient": sum(float(each.square().sum()) for each in found.values()),
                        "whole": norm,
                        "weight": (weight, whole[3]),
                        "outputs": max(
                            float((outputs[name] - whole[1][name]).abs().max()) for name in outputs
                        )
                        if how == "forward"
                        else 0.0,
                        "metrics": (own, wanted),
                        "share": idle_share,
                    }
                )
    return answers


PLACES = [
    ("tied_fused", "alone", {}),
    ("tied_fused", "alone", {"micro_batch_tokens": 24}),
    long("tied_fused", "fsdp2", {}),
    long("tied_fused", "hsdp4", {}),
    long("tied_fused", "fsdp2_tp2", {}),
    long("tied_fused", "fsdp2_cp2", {}),
]


@pytest.mark.parametrize(("model", "layout", "options"), PLACES)
def test_sequences_without_a_gradient_change_neither_gradient_nor_denominator(
    model, layout, options, tmp_path
):
    for answers in in_layout(compared, model, layout, str(tmp_path), options):
        for each in answers:
            how, idle, column = each["case"]
            assert each["error"] <= 1e-6, each["case"]
            assert bool(each["gradient"]) == bool(each["whole"]), each["case"]
            assert each["weight"][0] == each["weight"][1], each["case"]
            assert each["outputs"] <= 1e-5, each["case"]
            own, wanted = each["metrics"]
            if how == "forward":
                assert own == pytest.approx(wanted, rel=1e-5, abs=1e-6), each["case"]
            else:
                assert own["loss/mean"] == pytest.approx(wanted["loss/mean"], rel=1e-5, abs=1e-6)
            expected = 1.0 if idle == "all sequences" and column != "loss_weights" else None
            assert expected is None or each["share"] == expected, each["case"]


def updated(model: str, layout: str, folder: str, head: str) -> dict[str, dict]:
    """Return weights after two steps of two calls each, by what becomes of sequences without a
    gradient; under "whole" they have a backward pass.
    """
    answers = {}
    for how in ("forward", "skip", "whole"):
        engine = engine_of(MODELS[model], folder=folder, layout=LAYOUTS[layout], head=head)
        engine.config.zero_gradient = "forward" if how == "whole" else how
        engine.config.balance.loss_coefficient = 1e-30 * (how == "whole")  # all sequences learn
        loss = (ValueLoss.Config() if head == "values" else grpo()).build()
        for call in range(4):
            batch = batch_with((call, 4), "loss_weights" if head == "values" else "advantages")
            batch.columns["returns"] = batch.columns["old_values"] = batch.columns["correction"]
            engine.forward_backward(share(engine, batch), loss, temperature=TEMPERATURE)
            if call % 2:
                engine.optim_step()
        answers[how] = weights_of(engine)
    return answers


@pytest.mark.parametrize("head", ["logprobs", long("values")])
@pytest.mark.parametrize("layout", ["alone", *(long(n) for n in ("hsdp4", "fsdp2_tp2"))])
def test_steps_of_several_calls_end_with_the_weights_of_whole_ones(layout, head, tmp_path):
    for answers in in_layout(updated, "tied_fused", layout, str(tmp_path), head):
        for how in ("forward", "skip"):
            assert relative_error(answers[how], answers["whole"]) <= 1e-5, how


ZEROS = {
    "GRPO": (ClippedLoss.Config(), True),
    "decoupled": (DecoupledLoss.Config(), True),
    "GSPO": (GSPOLoss.Config(), True),
    "CISPO": (CISPOLoss.Config(), True),
    "DPPO": (DPPOLoss.Config(), True),
    "SAPO": (SAPOLoss.Config(), True),
    "GMPO": (GMPOLoss.Config(), True),
    "importance sampling": (ImportanceSamplingLoss.Config(), True),
    "an entropy bonus": (ClippedLoss.Config(entropy_coef=0.01), False),
    "a KL penalty": (ClippedLoss.Config(kl_coef=0.01), False),
    "cross entropy": (CrossEntropyLoss.Config(), False),
    "distillation": (DistillationLoss.Config(), False),
    "a surrogate of one's own": (UnknownTerm.Config(), False),
}


@pytest.mark.parametrize("case", ZEROS)
def test_losses_declare_the_tokens_that_they_have_no_gradient_for(case):
    config, declares = ZEROS[case]
    loss = config.build()
    columns = {"advantages": torch.tensor([0.0, 1.0, 0.0, -1.0])}
    found = loss.zero_gradient(columns)
    assert (None if found is None else found.tolist()) == ([1, 0, 1, 0] if declares else None)
    names = ("logprobs", "entropy", "behaviour_logprobs", "proximal_logprobs")
    names += ("reference_logprobs", "teacher_logprobs")
    values = {name: torch.randn(4) - 2 for name in names}
    values["logprobs"].requires_grad_()
    values["entropy"].requires_grad_()
    tokens = Tokens.of(values | columns, torch.tensor([0, 1, 2, 3]), 4)
    loss(tokens)[0].sum().backward()
    gradient = values["logprobs"].grad
    bonus = values["entropy"].grad
    has = gradient[[0, 2]].any() or (bonus is not None and bonus.any())
    assert bool(has) != declares
