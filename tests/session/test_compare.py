"""A comparison of generator and trainer names the module in which they begin to differ."""

from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from rl.algorithms.batch import make_batch
from rl.algorithms.losses import grpo
from rl.compare.comparison import Comparison, Example, comparable, stale_cache_findings
from rl.generation.generator_config import GeneratorConfig
from rl.types import GenerationRequest, Prompt, Rollout, Sampling, Sequence
from tests.kit.tables import long
from tests.session import faults
from tests.session.sessions import config_of, model_config, trainer_config

EXPERTS = {"num_experts": 4, "experts_per_token": 2, "moe_hidden_dim": 48, "expert_bias": True}
PROMPT = [*range(3, 43)]
SMALL = {"kv_cache_gib": 0.05}


async def running(sessions, **fields):
    defaults = {"trainer": trainer_config(), "generator": GeneratorConfig(**SMALL)}
    session = await sessions.start_as(comparable(config_of(**{**defaults, **fields})))
    await session.load()
    await session.connect()
    return session


@pytest.fixture(scope="module")
def alone(sessions):
    """A trainer and a generator of one rank each."""
    return sessions.run(running(sessions))


@pytest.fixture(params=["common", long("alone")])
def dense(request):
    """A session of a model without experts."""
    return request.getfixturevalue(request.param)


async def sampled(session, *, temperature=1.0):
    sampling = Sampling(max_tokens=21, temperature=temperature)
    request = GenerationRequest(request_id="one", prompt_tokens=PROMPT, seed=1, sampling=sampling)
    (completion,) = await session.sample([request], alone=True)
    sequence = Sequence.of(PROMPT, completion)
    prompt = Prompt(prompt_id=0, tokens=PROMPT, text="", answer="")
    rollout = Rollout.single_turn(prompt, completion, sample=0, text="", reward=0.0)
    nothing = np.full(len(sequence), np.nan, dtype=np.float32)
    return Example(rollout=rollout, number=0, sequence=sequence, trained=nothing)


async def train_and_push(session, example):
    batch = make_batch([example.rollout], torch.tensor([1.0]))
    await session.forward_backward(batch, grpo())
    await session.optim_step(lr=1e-2)
    async with session.running():
        await session.push()
        await session.settle()


async def ask(mesh, endpoint: str, *args):
    await mesh.call(getattr(mesh.actor, endpoint), *args)


async def found(session, example=None):
    example = example or await sampled(session)
    compared = await Comparison(session, example, temperature=1.0).compare()
    return compared.findings


@pytest.fixture(scope="module")
def experts(sessions):
    model = replace(model_config(tied=True), **EXPERTS)
    return sessions.run(running(sessions, model=model))


@asynccontextmanager
async def changed(mesh, fault, mended):
    await ask(mesh, "change", fault)
    try:
        yield
    finally:
        await ask(mesh, "change", mended)


async def test_models_without_a_fault_are_equal(sessions, dense):
    assert await found(dense) == []


async def test_log_probs_that_were_recorded_in_bfloat16_may_be_rounded(sessions, dense):
    example = await sampled(dense)
    rounded = replace(example.sequence, logprobs=example.sequence.logprobs + 0.05)
    example = replace(example, sequence=rounded)

    async def kinds(recorded):
        comparison = Comparison(dense, example, temperature=1.0, recorded=recorded)
        return [finding.kind for finding in (await comparison.compare()).findings]

    assert await kinds(torch.bfloat16) == []
    assert await kinds(torch.float32) == ["sampling settings"]


@pytest.mark.long
async def test_models_of_experts_without_a_fault_are_equal(sessions, experts):
    assert await found(experts) == []


IN_GENERATOR = {
    "rotation with another base": (
        faults.rotate(5e5),
        faults.rotate(1e6),
        "position encoding",
        "layers.0.attention.rope.queries",
    ),
    "missing norm": (
        faults.drop_norm,
        faults.restore_norm,
        "norm",
        "layers.1.attention.q_norm",
    ),
}


async def test_a_fault_of_a_generator_is_named(sessions, dense):
    (generator,) = dense.pool.meshes
    for fault, (broken, mended, *expected) in IN_GENERATOR.items():
        async with changed(generator, broken, mended):
            first, *_ = await found(dense)
        assert [first.kind, first.module] == expected, fault
        assert "rounding explains" in first.text, fault
    assert await found(dense) == []


async def test_a_trainer_without_a_mask_is_named(sessions, dense):
    async with changed(dense.trainer, faults.drop_mask, faults.restore_mask):
        first, *_ = await found(dense)
    assert (first.kind, first.module) == ("attention", "layers.0.attention.inner_attention")


async def test_a_parameter_that_was_not_pushed_is_named(sessions, dense):
    name = "layers.0.attention.qkv_linear.wqkv.weight"
    example = await sampled(dense)
    await ask(dense.trainer, "skip", name)
    await train_and_push(dense, example)
    first, *_ = await found(dense)
    assert (first.kind, first.module) == ("weights", name)
    await dense.connect()  # new publishers
    assert await found(dense) == []


async def test_an_output_head_that_is_not_the_embedding_is_named(sessions, dense):
    example = await sampled(dense)
    (generator,) = dense.pool.meshes
    async with changed(generator, faults.keep_head, faults.restore_head):
        await train_and_push(dense, example)
        first, *_ = await found(dense, example)
    assert (first.kind, first.module) == ("output head", "lm_head")


@pytest.mark.parametrize("is_broken", [False, True])
async def test_keys_of_older_weights_are_named(sessions, dense, is_broken):
    example = await sampled(dense)
    comparison = Comparison(dense, example, temperature=1.0)
    (generator,) = dense.pool.meshes
    broken = faults.keep_prefixes if is_broken else faults.nothing
    mended = faults.forget_prefixes if is_broken else faults.nothing
    await comparison.cached(fresh=True)
    assert (await comparison.cached(fresh=False)).outputs["norm"].isnan().any(), "nothing is cached"
    async with changed(generator, broken, mended):
        await train_and_push(dense, example)
        cached = await comparison.cached(fresh=False)
        findings = stale_cache_findings(cached, await comparison.cached(fresh=True))
    assert [each.kind for each in findings] == ["prefix cache"] * is_broken


async def test_another_temperature_is_named(sessions, dense):
    (first,) = await found(dense, await sampled(dense, temperature=0.7))
    assert first.kind == "sampling settings"
    assert "those of temperature 0.7, and the config has 1" in first.text


@pytest.mark.long
async def test_an_expert_that_is_not_the_chosen_one_is_named(sessions, experts):
    (generator,) = experts.pool.meshes
    async with changed(generator, faults.permute_experts, faults.restore_experts):
        first, *_ = await found(experts)
    assert (first.kind, first.module) == ("routing", "layers.1.moe")
    assert "tokens go to other experts" in first.text
