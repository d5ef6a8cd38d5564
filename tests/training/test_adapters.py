"""Adapters of one base take turns in a trainer: each trains as if it were alone, bit for bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torchtitan.components.lora import LoRAConverter

from rl.compat.torch_internals import local_tensor
from rl.errors import ConfigError, RunError
from rl.model.digest import digests, merge_digests
from rl.training.checkpoint import Checkpointer
from rl.training.engine import TrainingEngine
from rl.training.sharded_model import is_adapter
from rl.training.trainer_config import BASE, AdapterConfig
from tests.kit.batches import ragged_batch
from tests.kit.layouts import LAYOUTS
from tests.kit.scenes import (
    CLAMPED,
    EXPERTS,
    LOSS,
    TEMPERATURE,
    TIED_FUSED,
    UNTIED_SPLIT,
    engine_of,
    gradients_of,
    share,
    unequal,
    weights_of,
)
from tests.kit.tables import cases

MODELS = {
    "dense": UNTIED_SPLIT,
    "experts": replace(EXPERTS, tie_embeddings=False, fuse_qkv=False),
    "clamped": replace(CLAMPED, tie_embeddings=False, fuse_qkv=False),
}
WHOLE = AdapterConfig(4, alpha=6.0, seed=1)
SMALL = AdapterConfig(2, alpha=3.0, seed=2, attention=False)
ADAPTERS = {"a": WHOLE, "b": SMALL}
TOGETHER = ["dense alone", "dense fsdp2"]
LONG = ["experts alone", "dense tp2", "dense hsdp4", "experts tp2", "clamped fsdp2_tp2_ep2"]
PLACES = cases([*TOGETHER, *LONG], TOGETHER)
"""Models and layouts."""


def layers_of(model: str) -> list[str]:
    feed_forward = ["experts"] if model in ("experts", "clamped", "stacked") else ["w1", "w2", "w3"]
    return ["wq", "wkv", "wo", *feed_forward, "lm_head"]


def adapted(
    layout: str, folder: str, *, rank: int = 4, model: str = "dense", **trainer: Any
) -> TrainingEngine:
    """Return an engine of an untied model that has adapters of every layer."""
    lora = LoRAConverter.Config(rank=rank, target_modules=layers_of(model))
    options = {"layout": LAYOUTS[layout], "lora": lora, "lr": 1e-2, **trainer}
    return engine_of(MODELS[model], folder=folder, warmup=2, **options)


def checkpointer_of(engine: TrainingEngine, folder: str) -> Checkpointer:
    return Checkpointer(engine, UNTIED_SPLIT, folder=folder)


def train(engine: TrainingEngine, name: str, seed: int) -> Any:
    """Add a gradient of the adapter; return the outputs and metrics."""
    engine.adapters.use(name)
    given = share(engine, ragged_batch(seed=seed))
    return engine.forward_backward(given, LOSS.build(), temperature=TEMPERATURE)


def step(engine: TrainingEngine, name: str, **options: Any) -> Any:
    engine.adapters.use(name)
    return {**engine.optim_step(**options), "version": engine.version}


def logprobs_of(engine: TrainingEngine, source: Any = None) -> torch.Tensor:
    with engine.adapters.active_adapter(source):
        return engine.forward(share(engine, ragged_batch(seed=9)))["logprobs"]


def trained(engine: TrainingEngine, name: str | None) -> dict[str, torch.Tensor]:
    """Return the whole parameters of an adapter."""
    with engine.adapters.active_adapter(name):
        return {key: each for key, each in weights_of(engine).items() if is_adapter(key)}


CALLS = [
    *(("a", "train", 1), ("b", "train", 2), ("a", "train", 3), ("b", "step", {"lr": 5e-3})),
    *(("a", "step", {}), ("b", "train", 4), ("a", "train", 5), ("b", "step", {"max_norm": 1e30})),
    ("a", "step", {}),
]
"""Adapter, call and argument. Gradients of both are pending at once."""


def play_turns(model: str, layout: str, folder: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Return what the calls of ``names`` answer in a new engine, and what is trained."""
    engine = adapted(layout, folder, model=model)
    before = trained(engine, None)
    for name in names:
        engine.adapters.create(name, ADAPTERS[name])
    result: dict[str, Any] = {name: [] for name in names}
    for name, call, argument in CALLS:
        if name in names:
            answer = train(engine, name, argument) if call == "train" else None
            result[name].append(step(engine, name, **argument) if answer is None else answer)
            if len(names) > 1:  # none of this has an effect
                engine.offload()
                engine.onload()
                logprobs_of(engine, "b" if name == "a" else BASE)
    result["weights"] = {name: trained(engine, name) for name in names}
    assert unequal(before, trained(engine, None)) == []
    return result


def play_all(model: str, layout: str, folder: str) -> list[Any]:
    return [play_turns(model, layout, folder, names) for names in (("a", "b"), ("a",), ("b",))]


@pytest.fixture(params=PLACES)
def turns(request, once):
    answers, _ = once(play_all, *request.param.split())
    return answers


def by_rank(weight: torch.Tensor, key: str) -> torch.Tensor:
    """Return a factor with the rank as its first dimension."""
    return weight if key.endswith("lora_a.weight") else weight.movedim(-1, 0)


def equal(one: Any, other: Any) -> bool:
    """Whether all numbers and tensors are equal, bit for bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def test_two_adapters_interleaved_equal_two_apart_bit_for_bit(turns):
    for together, alone_a, alone_b in turns:
        for name, alone in (("a", alone_a), ("b", alone_b)):
            assert equal(together[name], alone[name])
            assert unequal(together["weights"][name], alone["weights"][name]) == []
            assert alone[name][-1]["version"] == sum(
                (who, what) == (name, "step") for who, what, _ in CALLS
            )


def test_every_layout_trains_the_same_adapters(request, turns, once):
    model, _ = request.node.callspec.params["turns"].split()
    ((alone, *_),), _ = once(play_all, model, "alone")
    for together, *_ in turns:
        for name in ADAPTERS:
            for key, weight in alone["weights"][name].items():
                found = together["weights"][name][key]
                assert (found - weight).abs().max() <= 2e-4 * weight.abs().max(), key


def test_a_smaller_rank_and_parts_that_are_off_stay_zero(turns):
    for together, *_ in turns:
        for key, weight in together["weights"]["b"].items():
            rows = by_rank(weight, key)
            on = ".attention." not in key
            assert (rows[:2] != 0).any() == on, key
            assert not rows[2:].any(), key


# One rank.


@pytest.mark.parametrize("model", ["dense", "experts"])
def test_an_adapter_equals_that_of_a_trainer_of_its_rank(folder, model):
    """A is drawn as the trainer draws its own, which ``engine_of`` then multiplies by 3."""
    wide, narrow = (adapted("alone", folder, rank=rank, model=model) for rank in (4, 2))
    for engine in (wide, narrow):
        engine.adapters.create("own", AdapterConfig(2, alpha=16.0))
    for key, weight in trained(narrow, "own").items():
        assert torch.equal(3 * weight, trained(narrow, None)[key])
    for seed in range(3):
        answers = [(train(each, "own", seed), step(each, "own")) for each in (wide, narrow)]
        assert answers[0][1] == pytest.approx(answers[1][1], rel=1e-5)
    ours, theirs = (trained(each, "own") for each in (wide, narrow))
    for key, weight in theirs.items():
        mine, weight = by_rank(ours[key], key)[:2], by_rank(weight, key)
        assert (mine - weight).abs().max() <= 1e-4 * weight.abs().max()


@pytest.mark.parametrize("model", MODELS)
def test_an_adapted_model_computes_what_its_merged_weights_do(folder, model):
    """The output head included; the merged weights are those that are pushed."""
    engine = adapted("alone", folder, model=model)
    engine.adapters.create("a", WHOLE)
    for seed in range(2):
        train(engine, "a", seed), step(engine, "a")
    plain = engine_of(MODELS[model], folder=folder)
    assert torch.equal(logprobs_of(engine, BASE), logprobs_of(plain))
    wanted = logprobs_of(engine, "a")
    engine.adapters.merge("a")
    merged = {name: shard.tensor.clone() for name, shard in engine.shards().items()}
    assert unequal(merged, weights_of(plain)).count("lm_head.weight") == 1
    for name, parameter in plain.model.named_parameters():
        local_tensor(parameter.detach()).copy_(merged[name])
    assert (logprobs_of(plain) - wanted).abs().max() <= 1e-5
    engine.adapters.merge(None)
    own = {name: shard.tensor for name, shard in engine.shards().items()}
    assert "lm_head.weight" in unequal(merged, own)


def test_a_call_that_raises_discards_only_the_gradient_of_its_adapter(folder):
    engine = adapted("alone", folder)
    for name in ADAPTERS:
        engine.adapters.create(name, WHOLE)
        train(engine, name, 1)
    with pytest.raises(RunError):
        engine.forward_backward(ragged_batch(), lambda tokens: (tokens["logprobs"][:1], {}))
    assert engine.adapters.current == "b"
    with pytest.raises(RuntimeError, match="no weight was accumulated"):
        engine.optim_step()
    assert step(engine, "a")["trainer/grad_norm"] > 0
    with pytest.raises(RunError, match="adapter 'c' does not exist"):
        engine.adapters.use("c")
    engine.adapters.drop("a")
    assert engine.adapters.current is None
    engine.offload()
    with pytest.raises(RuntimeError, match="use: the model is offloaded"):
        engine.adapters.use("b")


REFUSED = [
    ({"rank": 5}, "rank is 5; it must be 1 to trainer.lora.rank=4"),
    ({"rank": 0}, "rank is 0"),
    ({"alpha": float("inf")}, "alpha is inf; it must be above 0 and finite"),
    ({"mlp": False}, r"tied to the embedding; pass unembedding=False \(train_unembed=False\)"),
    ({"unembedding": False}, r"mlp is True.*pass mlp=False \(train_mlp=False\)"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_an_adapter_that_the_trainer_cannot_have_is_refused(fields, message):
    config = AdapterConfig(**{"rank": 2, **fields})
    with pytest.raises(ConfigError, match=message):
        config.check(LoRAConverter.Config(rank=4, target_modules=["wqkv"]), TIED_FUSED)


def test_an_adapter_of_a_tied_head_is_refused(folder):
    lora = LoRAConverter.Config(target_modules=["wo", "lm_head"])
    with pytest.raises(ConfigError, match="names lm_head, which is tied to the embedding"):
        engine_of(TIED_FUSED, folder=folder, lora=lora)


# States and snapshots.


def play_states(model: str, layout: str, folder: str) -> dict[str, Any]:
    """Save an adapter after two steps, with a gradient pending; return what it does next."""
    engine = adapted(layout, folder, model=model)
    checkpointer = checkpointer_of(engine, folder)
    engine.adapters.create("a", WHOLE)
    place = Path(folder)
    engine.adapters.use("a")
    checkpointer.save_state(place / "fresh")
    for seed in range(2):
        train(engine, "a", seed), step(engine, "a")
    train(engine, "a", 7)
    for _ in range(2):  # the second in place of the first
        checkpointer.save_state(place / "state")
    checkpointer.save_snapshot(place / "snapshot")
    with pytest.raises(RunError, match="snapshot exists, and a snapshot does not change"):
        checkpointer.save_snapshot(place / "snapshot")
    result = {"gradient": gradients_of(engine), "weights": trained(engine, "a")}
    step(engine, "a", lr=0.0)
    result["scored"] = logprobs_of(engine, place / "snapshot")
    assert not torch.equal(result["scored"], logprobs_of(engine, BASE))
    checkpointer.load_state(place / "state", True)
    result["next"] = [train(engine, "a", 3)[1], step(engine, "a")]
    engine.adapters.use(None)
    checkpointer.save_state(place / "policy")
    result["policy"] = digests(engine.trained_shards().values())
    checkpointer.close()
    return result


@pytest.fixture(params=["alone", "fsdp2"])
def states(request, once):
    answers, folder = once(play_states, "dense", request.param)
    return answers, Path(folder)


def test_a_state_of_any_layout_goes_on_as_if_nothing_had_happened(states, folder):
    answers, origin = states
    engine = adapted("alone", folder)
    checkpointer = checkpointer_of(engine, folder)
    engine.adapters.create("other", AdapterConfig(4, alpha=6.0, seed=5))
    train(engine, "other", 8)
    assert checkpointer.load_state(origin / "state", True) == 2
    assert unequal(trained(engine, "other"), answers[0]["weights"]) == []
    found = [train(engine, "other", 3)[1], step(engine, "other")]
    exact = len(answers) == 1
    for ours, theirs in zip(found, answers[0]["next"], strict=True):
        assert ours == theirs if exact else ours == pytest.approx(theirs, rel=1e-5)
    assert found[1]["version"] == 3

    engine.adapters.use(None)
    checkpointer.load_state(origin / "policy", True)
    held = merge_digests([digests(engine.trained_shards().values())])
    assert held == merge_digests([answer["policy"] for answer in answers])
    checkpointer.close()


def test_a_state_without_its_optimizer_begins_anew(states, folder):
    _, origin = states
    engine = adapted("alone", folder)
    checkpointer = checkpointer_of(engine, folder)
    rows = []
    for source, optimizer in (("state", False), ("snapshot", False), ("fresh", True)):
        engine.adapters.create(source, WHOLE)
        train(engine, source, 1)
        assert checkpointer.load_state(origin / source, optimizer) == 0
        assert not any(each.state for each in engine.optimizers)
        rows.append([train(engine, source, 3)[1], step(engine, source)])
    assert equal(rows[0], rows[1])
    assert rows[0][1]["trainer/lr/AdamW"] == rows[2][1]["trainer/lr/AdamW"] == 5e-3
    engine.reset_optimizer()
    assert engine.version == 1
    checkpointer.close()


def test_a_folder_of_something_else_is_refused(states, folder):
    _, origin = states
    engine = adapted("alone", folder)
    checkpointer = checkpointer_of(engine, folder)
    engine.adapters.create("small", SMALL)
    engine.adapters.use("small")
    for name, optimizer, message in (
        ("state", True, r"state has the adapter .*'rank': 4.*, not .*'rank': 2"),
        ("snapshot", True, "snapshot has weights alone; load it with optimizer=False"),
        ("policy", True, "policy holds no adapter"),
        ("absent", False, "absent"),
    ):
        with pytest.raises(RunError, match=message):
            checkpointer.load_state(origin / name, optimizer)
    before = logprobs_of(engine, "small")
    for name in ("policy", "absent"):
        with pytest.raises(RunError, match=name):
            logprobs_of(engine, origin / name)
    assert torch.equal(logprobs_of(engine, "small"), before)
    engine.adapters.use(None)
    with pytest.raises(RunError, match="is of another model"):
        checkpointer.load_state(origin / "state", True)
    other = adapted("alone", folder, rank=2)
    with pytest.raises(RunError, match="is of another model"):
        checkpointer_of(other, folder) and logprobs_of(other, origin / "snapshot")
    checkpointer.close()


def test_a_snapshot_scores_as_the_adapter_did_and_keeps_its_gradient(states, folder):
    answers, origin = states
    engine = adapted("alone", folder)
    checkpointer = checkpointer_of(engine, folder)
    train(engine, None, 1)
    before = gradients_of(engine)
    scored = logprobs_of(engine, origin / "snapshot")
    assert unequal(before, gradients_of(engine)) == []
    if len(answers) == 1:
        assert torch.equal(scored, answers[0]["scored"])
    engine.adapters.merge(origin / "state")
    held = engine.shards()["lm_head.weight"].tensor.clone()
    step(engine, None)
    assert torch.equal(held, engine.shards()["lm_head.weight"].tensor)
    checkpointer.close()
