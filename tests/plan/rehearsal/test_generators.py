"""Generators run as vLLM captures them in CUDA graphs, with the memory of the plan."""

import pytest

from rl.model.families import BUILT_IN, family_named
from tests.kit.tables import cases, long
from tests.plan.rehearsal.layouts import DENSE, EXPERTS, UNTIED
from tests.plan.rehearsal.mutations import Mutation
from tests.plan.rehearsal.test_recipes import GPUS, RL, on_gpus

G = "--generator"
GRAPHS = f"{G}.no-enforce_eager {G}.dtype bfloat16"
TINY = f"--config quickstart {GPUS} --model.n_layers 1 {GRAPHS}"
MIXTURE = "--model.num_experts 4 --model.experts_per_token 2 --model.moe_hidden_dim 64"


def options_of(name):
    family = family_named(name)
    degree = 1 if name in UNSHARDED else 2
    parallel = f"{G}.tensor_parallel_degree {degree}"
    return f"{TINY} {parallel} --model.family {name} {MIXTURE if family.has_experts else ''}"


UNSHARDED = ("olmo2", "olmo3")
"""Families whose norms are not sharded."""
FAMILIES = {name: options_of(name) for name in BUILT_IN}
LAYOUTS = {
    "0.6B": DENSE,
    "8B, TP 2": f"{UNTIED} {G}.tensor_parallel_degree 2 {G}.replicas 4",
    "8B, few requests": f"{UNTIED} {G}.max_running_requests 8",
    "experts": f"{EXPERTS} {GRAPHS}",
    "whole experts, records": f"{EXPERTS} {GRAPHS} {G}.expert_parallel {G}.record_experts True",
    "experts, eager": f"{EXPERTS} {G}.enforce_eager",
}
SHORT = ("gpt_oss", "qwen2")
"""Rehearsals for the default tests. Others are for the long tests."""
FORWARD = "rl.generation.vllm_model:HiddenStates.forward"
UNCAPTURED = {
    "a number of the device": "int(input_ids[0])",
    "shape of an index by a mask": "positions[positions > 0]",
    "shape of nonzero": "input_ids.nonzero()",
    "copy to the host": "positions.to('cpu', non_blocking=True)",
    "copy from the host": "positions.copy_(torch.zeros(1).expand(len(positions)))",
    "torch.cuda.synchronize": "torch.cuda.synchronize()",
}
"""Expressions that a graph cannot capture, by the reason of the error."""


HYBRID = ("qwen3_5_moe_text", "qwen3_5_text")
REHEARSED = [name for name in FAMILIES if name not in HYBRID]


@pytest.mark.parametrize("name", cases([*REHEARSED, *LAYOUTS], SHORT))
def test_a_generator_is_captured_with_the_planned_memory(name, rehearsals):
    options = {**FAMILIES, **LAYOUTS}[name]
    found = rehearsals.of(options, role="generator-0", rank=-1)
    check_generator(found)
    graphs = "NONE" if "eager" in name else "FULL_AND_PIECEWISE"
    if "num_experts" in options or "30b_a3b" in options:
        graphs = graphs.replace("AND_PIECEWISE", "DECODE_ONLY")
    assert found["generator"]["graphs"] == graphs
    assert found["generator"]["attention"] == "FLASH_ATTN"


@pytest.mark.long
@pytest.mark.parametrize("name", HYBRID)
def test_a_generator_with_gated_delta_nets_is_rehearsed_without_their_rule(name, rehearsals):
    found = rehearsals.of(f"{FAMILIES[name]} {G}.enforce_eager", role="generator-0")
    assert found["error"] is None
    assert found["planned"]["parameters"] == found["kept"]["parameters"]
    assert found["generator"]["token"] == found["token"]


@pytest.mark.long
@pytest.mark.parametrize("name", [one for one in RL if one.startswith(("qwen3_", "llama", "smol"))])
def test_the_generators_of_a_recipe_have_the_planned_memory(name, rehearsals):
    check_generator(rehearsals.of(f"--config {name} {on_gpus(name)}", role="generator-0"))


@pytest.mark.parametrize("reason", cases(UNCAPTURED, [*UNCAPTURED][:2]))
def test_what_a_graph_cannot_capture_is_found(reason, rehearsals):
    line = Mutation(FORWARD, "return", f"{UNCAPTURED[reason]}; return", "")
    found = rehearsals.of(FAMILIES["qwen3"], role="generator-0", change=line)
    assert found["error"].startswith(
        f"graph of 1 request: RuntimeError: a CUDA graph cannot capture this: {reason} "
        "(rl/generation/vllm_model.py:"
    )


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (("record_experts=", 'dtype="float32", record_experts='), "rl/model/experts.py"),
        long(
            ("init_fake_mode(", "device.capability = (8, 0); init_fake_mode("),
            "offsets of grouped products",
        ),
    ],
)
def test_experts_whose_tokens_the_host_counts_are_not_captured(change, where, rehearsals):
    run = "rl.plan.rehearsal.rehearsed_generator:run_generator"
    found = rehearsals.of(
        FAMILIES["qwen3_moe"], role="generator-0", change=Mutation(run, *change, "")
    )
    assert "a CUDA graph cannot capture this" in found["error"]
    assert where in found["error"]


def check_generator(found: dict) -> None:
    """Raise AssertionError unless a generator ran and its memory is that of the plan."""
    assert found["error"] is None
    planned, kept = found["planned"], found["kept"]
    assert planned["parameters"] == kept["parameters"]
    assert found["generator"]["token"] == found["token"]
    (step,) = (each for each in found["phases"] if each["phase"].startswith("step of"))
    needed = step["peak"] - kept["parameters"] - kept["buffers"]
    assert needed <= planned["engine step"] + kept["buffers"] <= 1.4 * needed
    assert planned["KV cache"] == pytest.approx(found["generator"]["cache"], rel=0.01)


def test_a_run_with_equal_bits_attends_by_flex_attention_on_both_sides(rehearsals):
    run = f"--config quickstart {GPUS} --parity bitwise {G}.dtype bfloat16"
    run += " --trainer.training.mixed_precision_param bfloat16"
    generator = rehearsals.of(run, role="generator-0")
    assert (generator["error"], generator["generator"]["attention"]) == (None, "FLEX_ATTENTION")
    trainer = rehearsals.of(run, role="trainer")
    assert trainer["error"] is None
    assert all(columns % 128 == 0 for _, columns in trainer["shapes"])
