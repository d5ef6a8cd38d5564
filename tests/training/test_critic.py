"""A critic has the trunk of a policy and a value head; gradients and checkpoints work alike."""

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rl.algorithms.losses import ValueLoss
from rl.model.digest import digests, merge_digests
from rl.model.shape import ModelConfig
from rl.training.checkpoint import Checkpointer
from rl.training.engine import TrainingEngine
from rl.types import Batch
from tests.training.batches import ragged_batch
from tests.training.layouts import LAYOUTS
from tests.training.ranks import on_ranks
from tests.training.reference import worst_error
from tests.training.scenes import MODELS, cut_by, engine_of, gradients_of, share, weights_of

LOSS = ValueLoss.Config(clip=0.5)


def judged_batch(seed: int = 0) -> Batch:
    """Return a batch with returns and old values; some old values are far from the critic's."""
    batch = ragged_batch(seed=seed)
    draw = torch.Generator().manual_seed(seed + 1)
    columns = {
        name: torch.randn(len(batch.tokens), generator=draw) for name in ("returns", "old_values")
    }
    return replace(batch, columns=batch.columns | columns)


CUTS: dict[str, Any] = {
    "one by one": ({"micro_batch_size": 1}, judged_batch()),
    "all at once": ({"micro_batch_size": 5}, judged_batch()),
    "padded": ({"micro_batch_size": 3, "packing": False}, judged_batch()),
    "two calls": ({}, judged_batch().select([0, 3]), judged_batch().select([1, 2, 4])),
}


def learn(engine: TrainingEngine, *batches: Batch) -> dict[str, float]:
    for batch in batches:
        engine.forward_backward(share(engine, batch), LOSS.build())
    return engine.optim_step()


def judged(layout: str, folder: str, cuts: Sequence[str] = tuple(CUTS)) -> dict[str, Any]:
    """Return the outputs of a critic in this layout, which saves between two steps."""
    model = MODELS["tied_fused"]
    place = {"folder": folder, "layout": LAYOUTS[layout], "head": "values"}
    still = engine_of(model, lr=0.0, **place)
    assert not still.model.enable_weight_tying
    result: dict[str, Any] = {
        "fresh": still.forward(share(still, judged_batch()))["values"],
        "gradients": {},
    }
    with torch.no_grad():
        still.model.lm_head.weight.fill_(0.1)
    for name in cuts:
        cut, *batches = CUTS[name]
        cut_by(still, **cut)
        for batch in batches:
            still.forward_backward(share(still, batch), LOSS.build())
        result["gradients"][name] = gradients_of(still)
        still.optim_step()
    engine = engine_of(model, **place)
    learn(engine, judged_batch())
    checkpointer = Checkpointer(engine, model, folder=folder)
    checkpointer.save(1, {})
    checkpointer.close()
    result |= {
        "saved": digests(engine.shards().values()),
        "second": learn(engine, judged_batch(seed=3)),
    }
    return result | {
        "weights": weights_of(engine),
        "values": engine.forward(share(engine, judged_batch()))["values"],
    }


def resumed(layout: str, folder: str) -> dict[str, Any]:
    engine = engine_of(MODELS["tied_fused"], folder=folder, layout=LAYOUTS[layout], head="values")
    checkpointer = Checkpointer(engine, MODELS["tied_fused"], folder=folder)
    checkpointer.load()
    checkpointer.close()
    return {
        "loaded": digests(engine.shards().values()),
        "second": learn(engine, judged_batch(seed=3)),
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("critic"))
    return judged("alone", folder), folder


def test_a_new_critic_predicts_0_and_learns_returns(alone):
    answer, folder = alone
    assert not answer["fresh"].any()
    engine = engine_of(MODELS["tied_fused"], folder=folder, lr=1e-2, steps=100, head="values")
    errors = []
    for _ in range(60):
        engine.forward_backward(judged_batch(), ValueLoss.Config(clip=0.0).build())
        errors.append(engine.optim_step()["value/error"])
    assert errors[-1] < errors[0] / 4


def test_the_gradient_is_that_of_one_sequence_at_a_time_however_the_batch_is_cut(alone):
    answer, _ = alone
    for name, gradients in answer["gradients"].items():
        assert worst_error(gradients, answer["gradients"]["one by one"]) <= 1e-6, name
    assert all(gradient.any() for gradient in answer["gradients"]["padded"].values())


@pytest.mark.parametrize("layout", ["fsdp2_tp2", pytest.param("cp2", marks=pytest.mark.long)])
def test_critic_does_not_depend_on_the_layout_and_resumes_on_one_rank(alone, layout, tmp_path):
    wanted, _ = alone
    cuts = ["padded", "two calls"]
    answers = on_ranks(LAYOUTS[layout].ranks, judged, layout, str(tmp_path), cuts)
    for answer in answers:
        for name, gradients in answer["gradients"].items():
            assert worst_error(gradients, wanted["gradients"]["one by one"]) <= 1e-5, name
        assert answer["second"] == pytest.approx(wanted["second"], rel=1e-4)
        for name, weight in wanted["weights"].items():
            torch.testing.assert_close(answer["weights"][name], weight, atol=1e-5, rtol=1e-4)
    (again,) = on_ranks(1, resumed, "alone", str(tmp_path))
    assert merge_digests([again["loaded"]]) == merge_digests(answer["saved"] for answer in answers)
    assert again["second"] == pytest.approx(answers[0]["second"], rel=1e-5)


def test_a_critic_starts_from_the_trunk_of_a_hugging_face_folder(tmp_path):
    policy = engine_of(MODELS["untied_split"], folder=str(tmp_path))
    checkpointer = Checkpointer(policy, MODELS["untied_split"], folder=str(tmp_path))
    checkpointer.export_hf(str(tmp_path / "export"))
    checkpointer.close()
    model = dataclasses.replace(ModelConfig(), hf_path=str(tmp_path / "export"))
    critic = engine_of(model, folder=str(tmp_path / "critic"), head="values")
    checkpointer = Checkpointer(critic, model, folder=str(tmp_path / "critic"))
    checkpointer.load()
    checkpointer.close()
    trunk = {
        name: shard for name, shard in weights_of(policy).items() if not name.startswith("lm_head")
    }
    held = weights_of(critic)
    # The folder's q, k and v are three tensors; the critic has them as its config says.
    for name in trunk.keys() & held.keys():
        assert torch.equal(held[name], trunk[name]), name
    assert len(trunk.keys() & held.keys()) > len(trunk) / 2
    assert Path(tmp_path / "export" / "model.safetensors").exists()
    assert not held["lm_head.weight"].any()
