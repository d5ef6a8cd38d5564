"""Two sharded sides have one set of weights and of log-probs (C2, C3), also with adapters, and of
experts.
"""

from dataclasses import replace

import pytest
import torch
from torchtitan.components.lora import LoRAConverter

from rl.algorithms.batch import make_batch
from rl.algorithms.losses import grpo
from rl.generation.generator_config import GeneratorConfig
from rl.model.digest import merge_digests
from rl.types import Batch, GenerationRequest, Prompt, Rollout, Sampling
from tests.kit.reference import Qwen3, given_experts, per_token
from tests.session.open_actors import shards_of, whole
from tests.session.sessions import PROMPTS, batch, model_config, trainer_config


async def assert_equal_weights(trainer, generator) -> None:
    trained = whole(await shards_of(trainer))
    pushed = whole(await shards_of(generator))
    assert pushed.keys() == trained.keys()
    for name, tensor in pushed.items():
        assert tensor.dtype == generator.dtype
        assert torch.equal(tensor, trained[name].to(generator.dtype)), name
    digests = merge_digests(await trainer.weight_digests(generator.dtype))
    assert merge_digests(await generator.weight_digests()) == digests


async def assert_equal_logprobs(session, temperature: float, tolerance: float) -> None:
    sampling = Sampling(max_tokens=24, temperature=temperature, stop_token_ids=(0,))
    requests = [
        GenerationRequest(
            request_id=f"{temperature}/{i}", prompt_tokens=prompt, seed=i, sampling=sampling
        )
        for i, prompt in enumerate(PROMPTS)
    ]
    completions = await session.sample(requests)
    rows = [
        prompt + completion.tokens for prompt, completion in zip(PROMPTS, completions, strict=True)
    ]
    tokens = torch.tensor([token for row in rows for token in row])
    lengths = torch.tensor([len(row) for row in rows])
    scored = await session.forward(
        Batch(tokens=tokens, lengths=lengths, loss_weights=torch.ones(len(tokens))),
        temperature=temperature,
    )
    logprobs = scored["logprobs"].split(lengths.tolist())
    for prompt, completion, own in zip(PROMPTS, completions, logprobs, strict=True):
        assert set(completion.versions) == {session.version}
        difference = own[len(prompt) :] - torch.tensor(completion.logprobs)
        assert difference.abs().max() <= tolerance


@pytest.mark.parametrize("adapters", [False, True])
async def test_pushed_weights_and_logprobs_of_two_sharded_sides(sessions, common, adapters):
    """FSDP2 x TP2 without adapters, FSDP2 with them."""
    (generator,) = common.pool.meshes
    trainer = common.trainer
    if adapters:
        config = trainer_config(fsdp=2, lora=LoRAConverter.Config())
        trainer = await sessions.start_mesh(sessions.meshes(trainer=config).models()["trainer"])
    config = GeneratorConfig(tensor_parallel_degree=2, kv_cache_gib=0.05)
    session = sessions.on(trainer, generator, generator=config)
    await session.connect()
    await assert_equal_weights(trainer, generator)
    async with session.running():
        for _ in range(2):
            await session.forward_backward(batch(), grpo(entropy_coef=0.01))
            await session.optim_step()
            assert await session.push() == session.version
            await assert_equal_weights(trainer, generator)
    for temperature in (1.0, 0.7):
        await assert_equal_logprobs(session, temperature, tolerance=1e-5)
    if adapters:
        await trainer.close()


@pytest.mark.long
async def test_a_token_is_trained_with_the_experts_that_it_was_sampled_with(sessions):
    """Also by newer weights, whose routers choose others."""
    model = replace(model_config(tied=True), num_experts=4, experts_per_token=2, moe_hidden_dim=48)
    trainer = replace(trainer_config(fsdp=2), router_replay="generator")
    trainer.parallelism.expert_parallel_degree = 2
    generator = GeneratorConfig(tensor_parallel_degree=2, expert_parallel=True, kv_cache_gib=0.05)
    session = await sessions.start(model=model, trainer=trainer, generator=generator)
    await session.load()
    await session.connect()
    sampling = Sampling(max_tokens=24)
    requests = [
        GenerationRequest(request_id=f"{i}", prompt_tokens=tokens, seed=i, sampling=sampling)
        for i, tokens in enumerate(PROMPTS)
    ]
    completions = await session.sample(requests)
    rollouts = [
        Rollout.single_turn(
            Prompt(prompt_id=0, tokens=tokens, text="", answer=""),
            completion,
            sample=number,
            text="",
            reward=0.0,
        )
        for number, (tokens, completion) in enumerate(zip(PROMPTS, completions, strict=True))
    ]
    sampled = make_batch(rollouts, torch.linspace(-1, 1, len(rollouts)))
    async with session.running():
        for step in range(3):
            weights = whole(await shards_of(session.trainer))
            reference = Qwen3(weights, n_layers=2, n_heads=4, head_dim=32, theta=1e6)
            wanted = [
                per_token(reference, tokens.tolist(), 1.0, experts=experts)[0].float().detach()
                for tokens, experts in zip(
                    sampled.tokens.split(sampled.lengths.tolist()),
                    given_experts(sampled),
                    strict=True,
                )
            ]
            outputs = (await session.forward(sampled))["logprobs"].split(sampled.lengths.tolist())
            for own, expected in zip(outputs, wanted, strict=True):
                torch.testing.assert_close(own[1:], expected, atol=1e-5, rtol=0)
            apart = torch.cat(outputs) - sampled.columns["behaviour_logprobs"]
            assert (apart[sampled.loss_mask].abs().max() <= 1e-5) == (step == 0)
            free = (await session.forward(replace(sampled, experts=None)))["logprobs"]
            assert ((torch.cat(outputs) - free).abs().max() <= 1e-5) == (step == 0)
            await session.forward_backward(sampled, grpo(entropy_coef=0.01))
            await session.optim_step(lr=3e-2)
