"""Generators without a trainer load the weights that a push would bring them, bit for bit."""

from dataclasses import replace

import pytest

from rl.errors import ConfigError, RunError
from rl.generation.generator_config import GeneratorConfig
from rl.model.digest import merge_digests
from rl.model.shape import ModelConfig
from rl.training.start_weights import Start, StartWeights
from rl.types import GenerationRequest, Sampling
from tests.kit.model_folders import Folder
from tests.kit.tables import long
from tests.session import faults
from tests.session.sessions import config_of, model_config, trainer_config

GREEDY = Sampling(max_tokens=8, temperature=0.0)
NORM = "layers.0.attention_norm.weight"


async def answered(session) -> tuple[dict[str, str], list]:
    """Return the digests of the generator of a started session, and greedy answers."""
    for role in session.present:
        await session.load(role=role)
    await session.connect()
    (mesh,) = session.pool.meshes
    requests = [
        GenerationRequest(request_id=f"{n}", prompt_tokens=[n, 7, 2], seed=0, sampling=GREEDY)
        for n in range(1, 4)
    ]
    answers = await session.sample(requests)
    return merge_digests(await mesh.weight_digests()), [
        (each.tokens, each.logprobs) for each in answers
    ]


@pytest.mark.parametrize("kind", [long("a folder, on two ranks"), "random, rounded"])
async def test_weights_are_those_of_a_push(sessions, tmp_path, kind):
    trainer = trainer_config()
    if kind.startswith("a folder"):
        folder = Folder({"tie_word_embeddings": True}, dtype="bfloat16").write(tmp_path / "model")
        model = ModelConfig(hf_path=str(folder), max_seq_len=96)
        generator = GeneratorConfig(tensor_parallel_degree=2, kv_cache_gib=0.05, dtype="bfloat16")
    else:
        model = model_config(tied=True)
        trainer.training.dtype = "bfloat16"
        generator = GeneratorConfig(kv_cache_gib=0.05)
    config = config_of(model=model, trainer=trainer, generator=generator)
    pushed = await sessions.start_as(config)
    expected = await answered(pushed)
    await pushed.stop()
    start = Start(dtype=trainer.training.dtype)
    own = await sessions.start_as(replace(config, trainer=None, start=start))
    assert [*own.present] == []
    assert await answered(own) == expected
    assert await own.differing_weights() == []
    (mesh,) = own.pool.meshes
    await mesh.call(mesh.actor.change, faults.double_norm)
    assert await own.differing_weights() == [NORM]
    for verb in (own.forward(None), own.optim_step(), own.save(1)):
        with pytest.raises(ConfigError, match="trains no policy; set trainer"):
            await verb
    await own.stop()


async def test_a_generator_that_computes_otherwise_than_the_first_is_found(sessions, monkeypatch):
    session = await sessions.start_as(
        config_of(trainer=None, generator=GeneratorConfig(kv_cache_gib=0.05))
    )
    await session.connect()
    (mesh,) = session.pool.meshes
    await mesh.call(mesh.actor.change, faults.drop_norm)
    with pytest.raises(RunError, match="canary .* from the files'"):
        await session.connect()

    digests_of = StartWeights.digests

    def other(self, dtype):
        digests = digests_of(self, dtype)
        (name, box), digest = next(iter(digests.items()))
        return digests | {(name, box): digest ^ 1}

    monkeypatch.setattr(StartWeights, "digests", other)
    session._push.checks.forget()
    with pytest.raises(RunError, match="1 of .* parameters .* differ from the files'; the first"):
        await session.connect()
    await session.stop()
