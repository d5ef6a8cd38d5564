"""Four trainer layouts, two generator layouts: one set of weights, one set of log-probs (C2, C3);
adapters merged.
"""

import asyncio

import pytest
import torch
from torchtitan.components.lora import LoRAConverter

from rl.algorithms.losses import grpo
from rl.generation.config import GeneratorConfig
from rl.model.shape import ModelConfig
from rl.types import Batch, GenerationRequest, Sampling
from rl.weights.digest import merge_digests, policy_digest
from tests.actors.meshes import connect, shards_of, trainer_config, whole

LAYOUTS = {
    "1": {},
    "FSDP2": {"fsdp": 2},
    "TP2": {"tp": 2},
    "FSDP2xTP2": {"fsdp": 2, "tp": 2},
    "FSDP2, adapters": {"fsdp": 2, "lora": LoRAConverter.Config()},
}
INITIAL: dict[bool, str] = {}  # digest of the weights that the first layout started from
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9], list(range(10, 30))]


def model_config(tied: bool) -> ModelConfig:
    return ModelConfig(
        vocab_size=64,
        dim=64,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=32,
        hidden_dim=96,
        max_seq_len=96,
        tie_embeddings=tied,
    )


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def generators(request, meshes):
    """Two generators of one model, TP 1 and TP 2, in the dtype that makes the push cast where
    untied.
    """
    dtype = "float32" if request.param else "bfloat16"
    configs = [
        GeneratorConfig(tensor_parallel_degree=tp, dtype=dtype, kv_cache_gib=0.05) for tp in (1, 2)
    ]

    async def start():
        return await asyncio.gather(
            *(meshes.generator(config, model_config(request.param)) for config in configs)
        )

    started = meshes.run(start())
    yield request.param, started
    meshes.run(meshes.stop(*started))


@pytest.fixture(
    params=[
        pytest.param(name, marks=[pytest.mark.long] if name in ("FSDP2", "TP2") else [], id=name)
        for name in LAYOUTS
    ]
)
def trainer(request, meshes, generators):
    tied, readers = generators

    async def start():
        trainer = await meshes.trainer(trainer_config(**LAYOUTS[request.param]), model_config(tied))
        await connect(trainer, *readers)
        return trainer

    trainer = meshes.run(start())
    yield trainer
    meshes.run(meshes.stop(trainer))


def batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([5, 9, 7, 12, 4])
    total = int(lengths.sum())
    weights = torch.ones(total)
    weights[lengths.cumsum(0) - lengths] = 0
    return Batch(
        tokens=torch.randint(0, 64, (total,), generator=generator),
        lengths=lengths,
        loss_weights=weights,
        columns={
            "advantages": torch.randn(total, generator=generator),
            "behaviour_logprobs": torch.full((total,), -4.0),
        },
    )


async def push(trainer, generators) -> None:
    version, _ = await trainer.push_weights()
    for generator in generators:
        await generator.pull_weights(version)


async def assert_equal_weights(trainer, generators) -> None:
    dtype = generators[0].dtype
    trained = whole(await shards_of(trainer))
    digests = merge_digests(await trainer.weight_digests(dtype))
    for generator in generators:
        pushed = whole(await shards_of(generator))
        assert pushed.keys() == trained.keys()
        for name, tensor in pushed.items():
            assert tensor.dtype == dtype
            assert torch.equal(tensor, trained[name].to(dtype)), name
        assert merge_digests(await generator.weight_digests()) == digests


async def assert_equal_logprobs(trainer, generators, temperature: float, tolerance: float) -> None:
    sampling = Sampling(max_tokens=24, temperature=temperature, stop_token_ids=(0,))
    requests = [
        GenerationRequest(
            request_id=f"{temperature}/{i}", prompt_tokens=prompt, seed=i, sampling=sampling
        )
        for i, prompt in enumerate(PROMPTS)
    ]
    for generator in generators:
        completions = await generator.generate(requests)
        rows = [
            prompt + completion.tokens
            for prompt, completion in zip(PROMPTS, completions, strict=True)
        ]
        tokens = torch.tensor([token for row in rows for token in row])
        lengths = torch.tensor([len(row) for row in rows])
        scored = await trainer.forward(
            Batch(tokens=tokens, lengths=lengths, loss_weights=torch.ones(len(tokens))),
            temperature=temperature,
        )
        logprobs = scored["logprobs"].split(lengths.tolist())
        for prompt, completion, own in zip(PROMPTS, completions, logprobs, strict=True):
            assert set(completion.versions) == {trainer.version}
            difference = own[len(prompt) :] - torch.tensor(completion.logprobs)
            assert difference.abs().max() <= tolerance


def test_pushed_weights_are_the_trainers_and_so_are_their_logprobs(meshes, trainer, generators):
    tied, readers = generators

    async def check():
        await push(trainer, readers)
        await assert_equal_weights(trainer, readers)
        initial = policy_digest(merge_digests(await trainer.weight_digests()))
        assert initial == INITIAL.setdefault(tied, initial), "layouts start from different weights"
        for _ in range(2):
            await trainer.forward_backward(batch(), grpo(entropy_coef=0.01), temperature=1.0)
            await trainer.optim_step()
            await push(trainer, readers)
            await assert_equal_weights(trainer, readers)
        assert trainer.version == 2
        if tied:  # fp32 on both sides
            await assert_equal_logprobs(trainer, readers, temperature=1.0, tolerance=1e-5)
            await assert_equal_logprobs(trainer, readers, temperature=0.7, tolerance=1e-5)

    meshes.run(check())
