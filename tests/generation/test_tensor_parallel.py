"""Two ranks as one generator: the same log-probs, one order of commands, no leftover files."""

import asyncio
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rl.compat.vllm_internals import model_of
from rl.errors import ConfigError
from rl.generation.generator_config import GeneratorConfig
from tests.generation.scenarios import played
from tests.generation.test_engine import PROMPTS, asked
from tests.kit.generator_ranks import GeneratorRanks, generate, names_left, push, request
from tests.kit.policies import (
    BIASED,
    EXPERTS,
    NARROW,
    SIZES,
    TIED_FUSED,
    UNTIED_SPLIT,
    Policy,
    error,
)


def test_a_kill_of_live_ranks_would_leave_no_files(generators, generator):
    """The memory is mapped but unlinked, so a killed process leaves nothing."""
    assert [*generators.run(names_left), *generator.run(names_left)] == [[], [], []]
    assert generators.run(maps_shared_memory) == generators.run(has_shared_memory)


def test_the_leaders_commands_reach_every_rank_in_order(generators, other_policy):
    (completions, waited), follower = generators.run(
        played, lead_or_follow, pull=("weights", other_policy.weights)
    )
    assert [len(c.tokens) for c in completions] == [200, 4, 16]
    assert set(completions[0].versions) == {1, 2}
    assert completions[2].versions == [2] * 16
    assert waited < 0.2  # CPU seconds of an idle pair
    assert follower == ["RunError", "RunError"]


def test_the_second_rank_pads_an_odd_vocabulary_with_zeros(generators):
    assert generators.run(logits_width) == [NARROW.vocab_size] * 2
    assert generators.run(owned_by_none) == [
        {},
        {"tok_embeddings.weight": [0.0], "lm_head.weight": [0.0]},
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "whole_experts"),
    [(TIED_FUSED, False), (UNTIED_SPLIT, False), (BIASED, False), (EXPERTS, False), (NARROW, True)],
    ids=["tied, fused", "untied, split", "biased", "experts", "whole experts, an odd vocabulary"],
)
def test_two_ranks_of_other_forms_of_the_model_agree_with_torchtitan(rebuilt, form, whole_experts):
    policy = Policy(form, seed=2)
    rebuilt.rebuild(form, expert_parallel=whole_experts, record_experts=form.num_experts > 0)
    rebuilt.run(push, policy.weights, 1)
    assert agreed_error(rebuilt, policy) <= 1e-5
    assert rebuilt.run(logits_width) == [form.vocab_size] * 2
    padding = rebuilt.run(owned_by_none)
    assert padding[0] == {}
    assert bool(padding[1]) == bool(form.vocab_size % 2)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "whole_experts"),
    [
        (replace(NARROW, n_kv_heads=2), True),
        (BIASED, False),
        (replace(BIASED, fuse_qkv=False), False),
    ],
    ids=["whole experts", "biased", "biased, split"],
)
def test_four_ranks_with_half_a_kv_head_each_agree_with_torchtitan(model, whole_experts):
    policy = Policy(model, seed=3)
    config = GeneratorConfig(
        tensor_parallel_degree=4, expert_parallel=whole_experts, kv_cache_gib=0.05
    )
    ranks = GeneratorRanks(config, model)
    try:
        ranks.run(push, policy.weights, 1)
        worst = agreed_error(ranks, policy)
    finally:
        ranks.close()
    assert worst <= 1e-5


def agreed_error(ranks: GeneratorRanks, policy: Policy) -> float:
    """Return the largest error of the log-probs, which are equal on all ranks."""
    first, *others = ranks.run(generate, asked(max_tokens=40))
    assert all(other == first for other in others)
    return max(
        error(policy, prompt, completion) for prompt, completion in zip(PROMPTS, first, strict=True)
    )


@pytest.mark.usefixtures("rebuilt")  # the failed loops close the engines
def test_a_rank_that_cannot_pull_ends_its_peers(generators, other_policy):
    leader, follower = generators.run(played_unequally, other_policy.weights)
    assert follower == ["serve: no such version 2"]
    cause = "another rank of this generator could not pull policy version 2"
    assert leader == [f"{who}: {cause}" for who in ("serve", "generate", "pull")]


def test_a_degree_that_does_not_divide_the_model_is_refused():
    from rl.generation.engine import GenerationEngine

    with pytest.raises(
        ConfigError, match="generator.tensor_parallel_degree is 3; .* allowed are \\[1, 2, 4\\]"
    ):
        GenerationEngine(GeneratorConfig(tensor_parallel_degree=3), TIED_FUSED, seed=0)


# Run on the ranks.


@pytest.mark.parametrize(("float32_head", "least", "most"), [(True, 0, 1e-5), (False, 1e-3, 0.1)])
def test_a_float32_head_of_two_ranks_rounds_no_logits(rebuilt, float32_head, least, most):
    form = replace(UNTIED_SPLIT, float32_head=float32_head)
    policy = Policy(form, seed=2)
    rebuilt.rebuild(form, dtype="bfloat16", expert_parallel=False, record_experts=False)
    rebuilt.run(push, policy.weights, 1)
    for found in rebuilt.run(error_of_head, policy.weights["lm_head.weight"]):
        assert least <= found < most


def error_of_head(engine, weight):
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, SIZES["dim"], generator=draw).bfloat16()
    wanted = hidden.float() @ weight.bfloat16().float().T
    return (model_of(engine._engine).compute_logits(hidden) - wanted).abs().max().item()


def logits_width(engine):
    model = model_of(engine._engine)
    return model.compute_logits(torch.ones(1, SIZES["dim"])).shape[1]


def owned_by_none(engine):
    """Return the largest value of each row of a matrix that no shard covers."""
    rows = Counter()
    for shard in engine.parameters():
        rows[shard.name] += len(shard.tensor)
    left = {
        name: parameter[rows[name] :] for name, parameter in engine._model.titan.named_parameters()
    }
    return {
        name: row.abs().amax(1).tolist() for name, row in left.items() if len(row) and row.ndim > 1
    }


def maps_shared_memory(engine):
    return "cpushm" in Path("/proc/self/maps").read_text()


def has_shared_memory(engine):
    """Return whether vLLM has collectives over shared memory on this processor."""
    return hasattr(torch.ops._C, "init_shm_manager")


async def lead_or_follow(loop):
    if not await loop.run_between_steps(lambda engine: engine.leads):
        refused = await asyncio.gather(
            loop.generate([request("x")]), loop.pull(2), return_exceptions=True
        )
        await asyncio.wait_for(loop.serve(), 120)
        return [type(each).__name__ for each in refused]
    long = asyncio.create_task(loop.generate([request("a", max_tokens=200)]))
    (short,) = await loop.generate([request("b", max_tokens=4)])
    await loop.pull(2)
    (after,) = await loop.generate([request("c")])
    completions = [*await long, short, after]
    before = time.process_time()
    await asyncio.sleep(1)
    return completions, time.process_time() - before


async def until_it_fails(loop, leads):
    waiting = {"serve": loop.serve()}
    if leads:
        waiting |= {"generate": loop.generate([request("r", max_tokens=200)]), "pull": loop.pull(2)}
    errors = await asyncio.wait_for(asyncio.gather(*waiting.values(), return_exceptions=True), 60)
    return [f"{who}: {error}" for who, error in zip(waiting, errors, strict=True)]


def played_unequally(engine, weights):
    pull = ("weights", weights) if engine.leads else ("raise", None)
    return played(engine, until_it_fails, engine.leads, pull=pull, keep_engine=False)
