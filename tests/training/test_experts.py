"""A mixture of experts is the same trainer in every layout, and its routing is measured."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torchtitan.config import CompileConfig
from torchtitan.distributed.activation_checkpoint import FullAC

from rl.compare.comparison import compared_of
from rl.errors import RunError
from rl.model.activations import Recorder
from rl.model.digest import merge_digests
from rl.model.shape import ModelShape, shape_of
from rl.model.shards import Box, Region
from rl.model.tp_plan import generator_layout
from rl.training.trainer_config import BalanceConfig
from rl.weights.routes import plan_routes
from tests.kit.batches import ragged_batch, with_experts, with_prompts
from tests.kit.layouts import Layout
from tests.kit.ranks import on_ranks
from tests.kit.reference import BALANCE, given_experts, loss_sum, of_scene, worst_error
from tests.kit.scenes import (
    CLAMPED,
    EXPERTS,
    FEW_CLAMPED,
    FEW_EXPERTS,
    LOSS,
    TEMPERATURE,
    accumulate,
    engine_of,
    exported,
    held,
    learn,
    loaded,
    unequal,
    weights_of,
)
from tests.kit.tables import cases

LONG = [pytest.mark.long]
RECOMPUTED = {"activation_checkpoint": FullAC.Config()}
COMPILED = {"compile": CompileConfig(enable=True, backend="aot_eager")}
LAYOUTS = {
    "tp2": (EXPERTS, Layout(tp=2)),
    "tp2_ep2": (EXPERTS, Layout(tp=2, ep=2)),
    "cp2_ep2": (EXPERTS, Layout(cp=2, ep=2)),
    "hsdp4_ep2": (EXPERTS, Layout(replicate=2, shard=2, ep=2)),
    "few_fsdp4": (FEW_EXPERTS, Layout(shard=4)),
    "few_fsdp2_ep2": (FEW_EXPERTS, Layout(shard=4, ep=2)),
    "clamped_tp2": (CLAMPED, Layout(tp=2)),
    "clamped_tp2_no_sp": (CLAMPED, Layout(tp=2, sequence_parallel=False)),
    "clamped_cp2_tp2": (CLAMPED, Layout(cp=2, tp=2)),
    "clamped_cp2_ep2": (CLAMPED, Layout(cp=2, ep=2)),
    "clamped_fsdp2_tp2_ep2": (CLAMPED, Layout(shard=2, tp=2, ep=2)),
    "clamped_hsdp4": (CLAMPED, Layout(replicate=2, shard=2)),
    "recomputed_tp2_ep2": (EXPERTS, Layout(tp=2, ep=2), RECOMPUTED),
    "compiled_ep2": (EXPERTS, Layout(shard=2, ep=2), COMPILED),
    "few_clamped_fsdp4": (FEW_CLAMPED, Layout(shard=4)),
    "few_clamped_fsdp2_tp2_ep2": (FEW_CLAMPED, Layout(shard=2, tp=2, ep=2)),
}
TOGETHER = ("cp2_ep2", "few_fsdp4")
"""Layouts that hold every dimension. Others are for the long tests."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory, lone_rank):
    """Return the weights of each model on one rank, by ``repr``."""
    folder = str(tmp_path_factory.mktemp("alone"))
    models = (EXPERTS, FEW_EXPERTS, CLAMPED, FEW_CLAMPED)
    return {repr(model): held(model, Layout(), folder) for model in models}


@pytest.mark.parametrize("name", cases(LAYOUTS, TOGETHER))
def test_ranks_hold_the_parts_of_one_model_and_learn_the_same(alone, folder, name):
    """FSDP cuts within the experts if there are more ranks than experts."""

    def assert_routes(shape: ModelShape, whole: dict[str, Box], held: list[dict[str, Box]]) -> None:
        """Generators of one and of two ranks can be filled from what trainer ranks hold."""
        sources = [
            tuple(Region(name, whole[name].shape, box) for name, box in boxes.items())
            for boxes in held
        ]
        for tp, expert_parallel in ((1, False), (2, False), (2, True)):
            for rank, wanted in enumerate(
                generator_layout(shape, fuse_qkv=True, tp=tp, expert_parallel=expert_parallel)
            ):
                routes = plan_routes(sources, wanted, reader=rank)
                assert sum(route.box.numel for route in routes) == sum(
                    region.box.numel for region in wanted
                )

    model, layout, *options = LAYOUTS[name]
    wanted = alone[repr(model)]
    play = partial(held, **dict(*options))
    answers = on_ranks(layout.ranks, play, model, layout, folder)
    assert merge_digests(answer["digests"] for answer in answers) == merge_digests(
        [wanted["digests"]]
    )
    boxes = [dict(answer["digests"].keys()) for answer in [wanted, *answers]]
    assert_routes(shape_of(model), boxes[0], boxes[1:])
    for answer in answers:
        assert worst_error(answer["gradients"], wanted["gradients"]) <= 1e-5


def test_recorded_experts_count_if_the_config_says_so(folder):
    def outputs_of_three_calls(folder: str, replay: str, is_recorded: bool) -> torch.Tensor:
        """Log-probs of a batch, of the batch without records, and of the batch again, [3, T]."""
        engine = engine_of(EXPERTS, folder=folder, router_replay=replay)
        batch = ragged_batch()
        recorded = with_experts(batch) if is_recorded else batch
        calls = [engine.forward(each)["logprobs"] for each in (recorded, batch, recorded)]
        return torch.stack(calls)

    found = {
        (replay, is_recorded): outputs_of_three_calls(folder, replay, is_recorded)
        for replay in ("none", "generator")
        for is_recorded in (False, True)
    }
    free = found["none", False]
    assert free.equal(found["none", True])
    assert free.equal(found["generator", False])
    told = found["generator", True]
    assert told[1].equal(free[1])  # a batch without records between two with records
    assert (told[0] - free[0]).abs().max() > 1e-3
    assert told[2].equal(told[0])


@pytest.mark.parametrize("model", [EXPERTS, CLAMPED], ids=["plain", "clamped"])
def test_tokens_without_weight_teach_neither_router_nor_experts(folder, model):
    """Padding and dummy rows go through experts too."""
    engine = engine_of(model, folder=folder, micro_batch_size=5)
    batch = ragged_batch()
    batch.loss_weights.zero_()
    engine.forward_backward(batch, LOSS.build())
    for name, parameter in engine.model.named_parameters():
        assert not parameter.grad.full_tensor().any(), name


def test_only_the_gradient_changes_the_policy(folder):
    """torchtitan's balancing bias would."""
    engine = engine_of(EXPERTS, folder=folder)
    names = [*engine.model.state_dict(), *dict(engine.model.named_buffers())]
    assert [name for name in names if "bias" in name] == []
    assert all(layer.moe.expert_bias_E is None for layer in engine.model.layers.values())


ROWS = with_experts(ragged_batch())
RATE = BalanceConfig(loss_coefficient=BALANCE, bias_rate=0.2)
WITH_BIAS = replace(EXPERTS, expert_bias=True)


def test_a_bias_follows_the_load_and_changes_the_choice(folder):
    """It moves only with a step. The weights of experts are without it."""
    engine = engine_of(WITH_BIAS, folder=folder, lr=0.0, decay=0.0, balance=RATE)
    before = weights_of(engine)
    engine.forward_backward(ROWS, LOSS.build(), temperature=TEMPERATURE)
    assert unequal(before, weights_of(engine)) == []
    engine.optim_step()
    after = weights_of(engine)
    biases = [f"layers.{layer}.moe.router.expert_bias" for layer in (0, 1)]
    assert unequal(before, after) == biases
    for layer, name in enumerate(biases):
        load = numbers_of(of_scene(before), ROWS, layer, replays=True)["load"]
        wanted = before[name] + 0.2 * torch.tensor(np.sign(load.mean() - load)).float()
        torch.testing.assert_close(after[name], wanted)
    free = ragged_batch()
    model = of_scene(after)
    loss_sum(model, free, LOSS, temperature=TEMPERATURE).backward()
    gradients = accumulate(engine, free)["gradients"]
    wanted = {name: model.weights[name].grad for name in gradients}
    assert worst_error(gradients, wanted) <= 4e-6
    without = of_scene({name: after[name] for name in after if name not in biases})
    other = loss_sum(without, free, LOSS, temperature=TEMPERATURE)
    assert abs(other - loss_sum(model, free, LOSS, temperature=TEMPERATURE)) > 1e-3


def balanced(layout: Layout, folder: str) -> dict[str, torch.Tensor]:
    """Return whole weights after steps that move biases."""
    engine = engine_of(WITH_BIAS, folder=folder, layout=layout, balance=RATE)
    for seed in range(3):
        learn(engine, ragged_batch(seed=seed))
    return weights_of(engine)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["clamped_fsdp2_tp2_ep2", "tp2", "cp2_ep2", "hsdp4_ep2", "few_fsdp4"]
)
def test_biases_and_what_is_learned_with_them_do_not_depend_on_the_layout(folder, name):
    _, layout = LAYOUTS[name]
    wanted = balanced(Layout(), folder)
    for answer in on_ranks(layout.ranks, balanced, layout, folder):
        assert worst_error(answer, wanted) <= 1e-5


def test_a_folder_holds_the_biases_of_routers_and_may_lack_them(tmp_path):
    source = engine_of(WITH_BIAS, folder=str(tmp_path))
    learn(source, ragged_batch())
    plain = engine_of(EXPERTS, folder=str(tmp_path))
    for engine, model in ((source, WITH_BIAS), (plain, EXPERTS)):
        folder = exported(engine, model, tmp_path)
        read = replace(WITH_BIAS, hf_path=str(folder))
        again = engine_of(read, folder=str(tmp_path / "again"), loads=True)
        with torch.no_grad():
            for layer in again.model.layers.values():
                layer.moe.router.expert_bias.zero_()
        loaded(again, str(tmp_path / "again"), read)
        found = weights_of(again)
        differ = unequal(weights_of(engine), found)
        assert differ == ([] if model is WITH_BIAS else [n for n in found if "expert_bias" in n])
        assert all(not found[name].any() for name in differ)
    refused = replace(EXPERTS, hf_path=str(exported(source, WITH_BIAS, tmp_path)))
    with pytest.raises(RunError, match="e_score_correction_bias and 1 more, for which the model"):
        loaded(plain, str(tmp_path / "other"), refused)


PROMPTS = with_experts(with_prompts(ragged_batch((9, 15, 1, 7, 11)), [0, 0, 1, 0, 0]))
FREE = {"router_replay": "none"}
MEASURED = {
    "free": (ROWS, FREE),
    "recomputed": (ROWS, FREE | {"activation_checkpoint": FullAC.Config()}),
    "padded": (ROWS, FREE | {"packing": False, "micro_batch_size": 5}),
    "shared prompts": (PROMPTS, FREE | {"prompt_sharing": 5, "micro_batch_size": 5}),
    "replayed": (ROWS, {}),
}


@pytest.mark.parametrize("how", MEASURED)
def test_the_routing_of_a_step_is_measured_as_of_one_sequence_at_a_time(folder, how):
    """Numbers of a second call are added. Passes without a gradient are not measured."""
    batch, fields = MEASURED[how]
    engine = engine_of(EXPERTS, folder=folder, **fields)
    model = of_scene(weights_of(engine_of(EXPERTS, folder=folder)))
    engine.forward(batch)
    for rows in ([0, 3], [1, 2, 4]):
        engine.forward_backward(batch.select(rows), LOSS.build())
    found = engine.optim_step()
    layers = [numbers_of(model, batch, layer, replays=how == "replayed") for layer in (0, 1)]
    for name in ("load_max", "entropy", "differing"):
        values = [each[name] for each in layers]
        whole = max(values) if name == "load_max" else sum(values) / 2
        own = {"": whole, "/0": values[0], "/1": values[1]}
        wanted = {f"experts/{name}{end}": pytest.approx(value) for end, value in own.items()}
        assert found.items() >= wanted.items()


def numbers_of(model, batch, layer: int, *, replays: bool) -> dict[str, Any]:
    load = np.zeros(4)
    entropy = []
    differing = []
    for tokens, records in zip(
        batch.tokens.split(batch.lengths.tolist()), given_experts(batch), strict=True
    ):
        model(tokens.tolist(), records if replays else None)
        for place, probs in enumerate(model.routed[layer].detach()[:-1]):
            chosen = probs.topk(2).indices.tolist()
            record = records[place, layer].tolist()
            if -1 not in record:
                differing.append({*chosen} != {*record})
                chosen = record if replays else chosen
            load[chosen] += 1
            entropy.append(-float((probs * probs.log()).sum()))
    shares = {"entropy": np.mean(entropy), "differing": np.mean(differing)}
    return {"load_max": load.max() / load.mean(), "load": load, **shares}


def test_a_comparison_counts_the_tokens_that_go_to_other_experts(folder, monkeypatch):
    engine = engine_of(EXPERTS, folder=folder)
    router = engine.model.layers["1"].moe.router
    route = router.forward

    def elsewhere(*args):
        weights, experts, scores = route(*args)
        experts[:, :5] = (experts[:, :5] + 1) % 4
        return weights, experts, scores

    sides = {}
    for side in ("ours", "theirs"):
        with Recorder(engine.model, [*range(14)]) as recorder:
            engine.forward(ragged_batch((15,)))
        sides[side] = recorder.activations
        monkeypatch.setattr(router, "forward", elsewhere)
    compared = compared_of(None, sides)
    (finding,) = compared.findings
    assert (finding.kind, finding.module) == ("routing", "layers.1.moe")
    assert finding.text.endswith("; 5 of 14 tokens go to other experts")
    assert compared.rerouted == {"layers.1": "5 of 14 tokens go to other experts"}
