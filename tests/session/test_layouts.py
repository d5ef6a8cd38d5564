"""Four trainer layouts, two generator layouts: one set of weights, one set of log-probs (C2, C3);
adapters merged.
"""

import asyncio

import pytest
import torch
from torchtitan.components.lora import LoRAConverter

from rl.algorithms.losses import grpo
from rl.generation.config import GeneratorConfig
from rl.model.digest import merge_digests, policy_digest
from rl.types import Batch, GenerationRequest, Sampling
from tests.session.open_actors import shards_of, whole
from tests.session.sessions import PROMPTS, batch, model_config, on_its_loop, trainer_config

LAYOUTS = {
    "1": {},
    "FSDP2": {"fsdp": 2},
    "TP2": {"tp": 2},
    "FSDP2xTP2": {"fsdp": 2, "tp": 2},
    "FSDP2, adapters": {"fsdp": 2, "lora": LoRAConverter.Config()},
}
INITIAL: dict[bool, str] = {}  # digest of the weights that the first layout started from


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def generators(request, sessions):
    """Two generators of one model, TP 1 and TP 2, in the dtype that makes the push cast if
    untied.
    """
    model = model_config(request.param)

    async def start(tp: int):
        config = generator_config(request.param, tp)
        mesh = sessions.meshes(model=model, generator=config).generator(tp)
        return await sessions.start_mesh(mesh)

    async def start_both():
        return await asyncio.gather(start(1), start(2))

    started = sessions.run(start_both())
    yield request.param, started
    for mesh in started:
        sessions.run(mesh.close())


def generator_config(tied: bool, tp: int = 1) -> GeneratorConfig:
    dtype = "float32" if tied else "bfloat16"
    return GeneratorConfig(tensor_parallel_degree=tp, dtype=dtype, kv_cache_gib=0.05, block_size=32)


@pytest.fixture(params=LAYOUTS)
def trainer(request, sessions, generators):
    tied, _ = generators

    async def start():
        config = trainer_config(**LAYOUTS[request.param])
        meshes = sessions.meshes(model=model_config(tied), trainer=config)
        return await sessions.start_mesh(meshes.models()["trainer"])

    trainer = sessions.run(start())
    yield trainer
    sessions.run(trainer.close())


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


async def check_pushes(session, generator) -> None:
    await session.connect()
    await assert_equal_weights(session.trainer, generator)
    async with session.running():
        for _ in range(2):
            await session.forward_backward(batch(), grpo(entropy_coef=0.01))
            await session.optim_step()
            assert await session.push() == session.version
            await assert_equal_weights(session.trainer, generator)


@pytest.mark.parametrize("name", ["FSDP2xTP2", "FSDP2, adapters"])
@on_its_loop
async def test_pushed_weights_and_logprobs_of_two_sharded_sides(sessions, common, name):
    """Trainers of four ranks without adapters, and of two with them; a generator of two."""
    (generator,) = common.pool.meshes
    trainer = common.trainer
    if name != "FSDP2xTP2":
        meshes = sessions.meshes(trainer=trainer_config(**LAYOUTS[name]))
        trainer = await sessions.start_mesh(meshes.models()["trainer"])
    session = sessions.on(trainer, generator, generator=generator_config(tied=True, tp=2))
    await check_pushes(session, generator)
    for temperature in (1.0, 0.7):
        await assert_equal_logprobs(session, temperature, tolerance=1e-5)
    if name != "FSDP2xTP2":
        await trainer.close()


@pytest.mark.long
@on_its_loop
async def test_pushed_weights_and_logprobs(sessions, trainer, generators):
    tied, readers = generators
    initial = policy_digest(merge_digests(await trainer.weight_digests()))
    assert initial == INITIAL.setdefault(tied, initial), "layouts start from different weights"
    for reader in readers:
        fields = {"model": model_config(tied), "generator": generator_config(tied)}
        session = sessions.on(trainer, reader, **fields)
        await check_pushes(session, reader)
        if tied:  # fp32 on both sides
            await assert_equal_logprobs(session, temperature=1.0, tolerance=1e-5)
            await assert_equal_logprobs(session, temperature=0.7, tolerance=1e-5)
    assert trainer.version == 4
