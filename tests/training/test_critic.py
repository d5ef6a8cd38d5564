"""A critic has the trunk of a policy and a value head, which learns returns and is saved."""

from typing import Any

import pytest
import torch

from rl.algorithms.losses import ValueLoss
from rl.model.digest import digests, merge_digests
from rl.model.shape import ModelConfig
from rl.training.engine import TrainingEngine
from rl.types import Batch
from tests.kit.batches import ragged_batch
from tests.kit.layouts import LAYOUTS
from tests.kit.ranks import on_ranks
from tests.kit.scenes import (
    MODELS,
    engine_of,
    exported,
    loaded,
    saved,
    share,
    unequal,
    weights_of,
)
from tests.kit.tables import long


def judged_batch(seed: int = 0) -> Batch:
    """Return a batch with returns and old values; some old values are far from the critic's."""
    batch = ragged_batch(seed=seed)
    draw = torch.Generator().manual_seed(seed + 1)
    for name in ("returns", "old_values"):
        batch.columns[name] = torch.randn(len(batch.tokens), generator=draw)
    return batch


def learn(engine: TrainingEngine, seed: int, clip: float = 0.5) -> dict[str, float]:
    loss = ValueLoss.Config(clip=clip).build()
    engine.forward_backward(share(engine, judged_batch(seed)), loss)
    return engine.optim_step()


def critic_of(layout: str, folder: str, **fields: Any) -> TrainingEngine:
    place = {"folder": folder, "layout": LAYOUTS[layout], "head": "values"}
    return engine_of(MODELS["biased"], **place, **fields)


def judged(layout: str, folder: str) -> dict[str, Any]:
    """Return a critic's digests after a step, when it is saved, and the next step."""
    engine = critic_of(layout, folder)
    learn(engine, seed=0)
    saved(engine, folder, {})
    return {"saved": digests(engine.shards().values()), "second": learn(engine, seed=3)}


def test_a_new_critic_predicts_0_and_learns_returns(folder):
    engine = critic_of("alone", folder, lr=1e-2, steps=100)
    assert not engine.model.enable_weight_tying
    assert not engine.forward(judged_batch())["values"].any()
    errors = [learn(engine, seed=0, clip=0.0)["value/error"] for _ in range(60)]
    assert errors[-1] < errors[0] / 4


@pytest.mark.parametrize("layout", ["fsdp2_tp2", long("cp2")])
def test_a_critic_of_any_layout_resumes_on_one_rank(layout, folder, tmp_path):
    wanted = judged("alone", str(tmp_path / "alone"))
    answers = on_ranks(LAYOUTS[layout].ranks, judged, layout, folder)
    for answer in answers:
        assert answer["second"] == pytest.approx(wanted["second"], rel=1e-4)
    again = critic_of("alone", folder)
    loaded(again, folder)
    held = merge_digests([digests(again.shards().values())])
    assert held == merge_digests(answer["saved"] for answer in answers)
    assert learn(again, seed=3) == pytest.approx(answers[0]["second"], rel=1e-5)


def test_a_critic_starts_from_the_trunk_of_a_hugging_face_folder(tmp_path):
    policy = engine_of(MODELS["untied_split"], folder=str(tmp_path))
    export = exported(policy, MODELS["untied_split"], tmp_path)
    model = ModelConfig(hf_path=str(export), fuse_qkv=False)
    critic = engine_of(model, folder=str(tmp_path / "critic"), head="values")
    loaded(critic, str(tmp_path / "critic"), model)
    held = weights_of(critic)
    head = held.pop("lm_head.weight")
    assert not head.any()
    assert unequal(weights_of(policy), held) == ["lm_head.weight"]
