"""A mixture of experts is the model that transformers has, and the same trainer in every layout."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rl.model.digest import merge_digests
from rl.model.shape import ModelConfig, ModelShape, shape_of
from rl.model.shards import Box, Region
from rl.model.tp_plan import generator_layout
from rl.training.checkpoint import Checkpointer
from rl.weights.routes import plan_routes
from tests.training.batches import ragged_batch
from tests.training.layouts import Layout
from tests.training.ranks import on_ranks
from tests.training.reference import worst_error
from tests.training.scenes import (
    EXPERTS,
    FEW_EXPERTS,
    LOSS,
    MODELS,
    RUN_STATE,
    SIZES,
    engine_of,
    held,
    logits_of,
    resume,
)
from tests.training.test_hugging_face import same_tensors

LONG = [pytest.mark.long]
LAYOUTS = {
    "tp2": (EXPERTS, Layout(tp=2)),
    "tp2_ep2": (EXPERTS, Layout(tp=2, ep=2)),
    "cp2_ep2": (EXPERTS, Layout(cp=2, ep=2)),
    "hsdp4_ep2": (EXPERTS, Layout(replicate=2, shard=2, ep=2)),
    "few_fsdp4": (FEW_EXPERTS, Layout(shard=4)),
    "few_fsdp2_ep2": (FEW_EXPERTS, Layout(shard=4, ep=2)),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory, lone_rank):
    """Return the weights of each model on one rank."""
    folder = str(tmp_path_factory.mktemp("alone"))
    return {
        experts.num_experts: held(experts, Layout(), folder) for experts in (EXPERTS, FEW_EXPERTS)
    }


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(
            *LAYOUTS[name], id=name, marks=[] if name in ("cp2_ep2", "few_fsdp4") else LONG
        )
        for name in LAYOUTS
    ],
)
def test_ranks_hold_the_parts_of_one_model_and_learn_the_same(alone, folder, model, layout):
    """FSDP cuts within the experts if there are more ranks than experts."""
    wanted = alone[model.num_experts]
    answers = on_ranks(layout.ranks, held, model, layout, folder)
    assert merge_digests(answer["digests"] for answer in answers) == merge_digests(
        [wanted["digests"]]
    )
    boxes = [dict(answer["digests"].keys()) for answer in [wanted, *answers]]
    assert_routes(shape_of(model), boxes[0], boxes[1:])
    for answer in answers:
        assert worst_error(answer["gradients"], wanted["gradients"]) <= 1e-5


def assert_routes(shape: ModelShape, whole: dict[str, Box], held: list[dict[str, Box]]) -> None:
    """Generators of one and of two ranks can be filled from what trainer ranks hold, each element
    once.
    """
    sources = [
        tuple(Region(name, whole[name].shape, box) for name, box in boxes.items()) for boxes in held
    ]
    for tp, expert_parallel in ((1, False), (2, False), (2, True)):
        for rank, wanted in enumerate(
            generator_layout(shape, fuse_qkv=True, tp=tp, expert_parallel=expert_parallel)
        ):
            routes = plan_routes(sources, wanted, reader=rank)
            assert sum(route.box.numel for route in routes) == sum(
                region.box.numel for region in wanted
            )


@pytest.mark.long
def test_a_checkpoint_of_divided_experts_resumes_on_one_rank(played):
    answers, folder = played("experts", "fsdp2_tp2_ep2")
    answer = resume("experts", "alone", folder)
    assert (answer["run_state"], answer["loaded"]) == (RUN_STATE, (2, 1))
    assert answer["step"] == pytest.approx(answers[0]["steps"][-1], rel=1e-6)


def test_tokens_without_weight_teach_neither_router_nor_experts(folder):
    """Padding and dummy rows go through experts too."""
    engine = engine_of(EXPERTS, folder=folder, micro_batch_size=5)
    batch = ragged_batch()
    batch.loss_weights.zero_()
    engine.forward_backward(batch, LOSS.build())
    for name, parameter in engine.model.named_parameters():
        assert not parameter.grad.full_tensor().any(), name


def test_choices_of_experts_do_not_depend_on_rounding(folder):
    """Or the tests of gradients could fail without a fault."""
    engine = engine_of(EXPERTS, folder=folder)
    gaps = []

    def measure(_router, _args, out):
        ranked = out[2].sort(descending=True).values
        gaps.append((ranked[..., 1] - ranked[..., 2]).min().item())

    for layer in engine.model.layers.values():
        layer.moe.router.register_forward_hook(measure)
    engine.forward(ragged_batch())
    assert min(gaps) > 1e-4


def test_only_the_gradient_changes_the_policy(folder):
    """torchtitan's balancing bias would."""
    engine = engine_of(EXPERTS, folder=folder)
    names = [*engine.model.state_dict(), *dict(engine.model.named_buffers())]
    assert [name for name in names if "bias" in name] == []
    assert all(layer.moe.expert_bias_E is None for layer in engine.model.layers.values())


def write_folder(folder: Path, *, tied: bool) -> Path:
    """A random mixture as transformers saves it, with weights large enough to matter."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=SIZES["vocab_size"],
        hidden_size=SIZES["dim"],
        intermediate_size=SIZES["hidden_dim"],
        num_hidden_layers=SIZES["n_layers"],
        num_attention_heads=SIZES["n_heads"],
        num_key_value_heads=SIZES["n_kv_heads"],
        head_dim=SIZES["head_dim"],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        norm_topk_prob=True,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        dtype="float32",
    )
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _ = parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(std=0.1)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False])
def test_a_mixture_of_transformers_has_equal_outputs_and_is_exported_unchanged(tmp_path, tied):
    source = write_folder(tmp_path / "in", tied=tied)
    out = tmp_path / "out"
    model = ModelConfig(hf_path=str(source))
    engine = engine_of(model, folder=str(tmp_path))
    checkpointer = Checkpointer(engine, model, folder=str(tmp_path))
    checkpointer.load()
    tokens = torch.randint(SIZES["vocab_size"], (2, 32), generator=torch.Generator().manual_seed(1))
    logits = logits_of(engine, tokens)
    wanted = AutoModelForCausalLM.from_pretrained(source).eval()(tokens).logits
    assert wanted.std() > 0.3
    assert (logits - wanted).abs().max() <= 1e-5

    checkpointer.export_hf(str(out))
    checkpointer.close()
    same_tensors(source, out)


@torch.no_grad()
def test_a_mixture_from_random_weights_is_one_that_transformers_loads(tmp_path):
    model = MODELS["experts"]
    engine = engine_of(model, folder=str(tmp_path))
    checkpointer = Checkpointer(engine, model, folder=str(tmp_path))
    checkpointer.export_hf(str(tmp_path / "out"))
    checkpointer.close()
    tokens = torch.randint(
        SIZES["vocab_size"], (1, model.max_seq_len), generator=torch.Generator().manual_seed(1)
    )
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert {kind: list(names) for kind, names in info.items() if names} == {}
    assert (theirs.eval()(tokens).logits - logits_of(engine, tokens)).abs().max() <= 1e-5
