"""Adapters and snapshots of a session: what generators sample from is what the trainer scores."""

import asyncio
import os
import signal
from dataclasses import replace

import pytest
import torch
from torchtitan.components.lora import LoRAConverter

from rl.algorithms.losses import grpo
from rl.errors import ActorFailure, ConfigError, RunError
from rl.generation.generator_config import GeneratorConfig
from rl.training.trainer_config import AdapterConfig
from rl.types import Batch, GenerationRequest, Sampling
from tests.kit.policies import EXPERTS
from tests.kit.processes import pids_of
from tests.session.open_actors import OpenTrainer
from tests.session.sessions import PROMPTS, batch, config_of, trainer_config

LOSS = grpo(entropy_coef=0.01)
SAMPLING = Sampling(max_tokens=12, temperature=0.7, stop_token_ids=(0,))
CONFIG = AdapterConfig(rank=4, alpha=16.0, unembedding=False)


@pytest.fixture(scope="module")
def session(sessions, common):
    """FSDP2 with adapters, and the generator of two ranks that the tests of the folder share."""
    trainer = trainer_config(fsdp=2, lora=LoRAConverter.Config(rank=4))
    trainer.training.gc_freq = 3
    mesh = sessions.run(sessions.start_mesh(sessions.meshes(trainer=trainer).models()["trainer"]))
    generator = GeneratorConfig(tensor_parallel_degree=2, kv_cache_gib=0.05)
    session = sessions.on(mesh, common.pool.meshes[0], generator=generator)
    sessions.run(session.connect())
    yield session
    sessions.run(mesh.close())
    sessions.run(common.connect())


async def train(session, adapter: str | None, steps: int = 1) -> None:
    for _ in range(steps):
        await session.forward_backward(batch(), LOSS, adapter=adapter)
        await session.optim_step(adapter=adapter)


async def difference(session, held, name: str, **scored) -> float:
    """Return the largest difference between the log-probs of samples, from generators that hold
    ``held``, and those of ``forward`` with the options ``scored``.
    """
    requests = [
        GenerationRequest(request_id=f"{name}/{i}", prompt_tokens=each, seed=i, sampling=SAMPLING)
        for i, each in enumerate(PROMPTS)
    ]
    completions = await session.sample(requests, weights=held)
    rows = [given + each.tokens for given, each in zip(PROMPTS, completions, strict=True)]
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.tensor([token for row in rows for token in row])
    given = Batch(tokens=tokens, lengths=lengths, loss_weights=torch.ones(len(tokens)))
    outputs = await session.forward(given, temperature=0.7, **scored)
    own = outputs["logprobs"].split(lengths.tolist())
    return max(
        float((each[len(prompt) :] - torch.tensor(completion.logprobs)).abs().max())
        for prompt, completion, each in zip(PROMPTS, completions, own, strict=True)
    )


async def test_samples_have_the_log_probs_of_their_snapshot(session, tmp_path):
    """While adapters and the policy train on, and calls for different weights come at once."""
    push = session._push
    async with session.running():
        for name in ("a", "b"):
            await session.create_adapter(name, CONFIG)
            await train(session, name, steps=2 if name == "a" else 1)
            await session.save_snapshot(tmp_path / name, adapter=name)
            await session.forward_backward(batch(), LOSS, adapter=name)
        snapshots = {name: tmp_path / name for name in ("a", "b")}
        asked = [("base", None), ("a", 1), ("b", 1), ("a", 2), ("base", 2), ("b", 2)]
        version = push.state.pending.version
        found = await asyncio.gather(
            *(
                difference(session, held, f"{name}/{number}", weights=held)
                for name, number in asked
                for held in [snapshots.get(name, name)]
            )
        )
        assert max(found) <= 1e-5
        assert (
            push.state.pending.version == version + 3
        )  # one change for all calls of the same weights
        assert await difference(session, snapshots["a"], "live", adapter="a") <= 1e-5
        assert await difference(session, snapshots["a"], "other", adapter="b") > 1e-4

        assert await difference(session, None, "pushed") <= 1e-5
        await train(session, None)
        before = await session.weight_digest()
        await difference(session, snapshots["b"], "b/3", weights=snapshots["b"])
        assert await session.weight_digest() == before
        with pytest.raises(RunError, match="has changed since its last push: call push"):
            await difference(session, None, "stale")
        await session.push()
        assert await difference(session, None, "new") <= 1e-5
        assert await session.differing_weights() == []
        with pytest.raises(ActorFailure, match="absent"):
            await difference(session, tmp_path / "absent", "absent")
        assert await difference(session, snapshots["a"], "a/3", weights=snapshots["a"]) <= 1e-5
        await session.settle()
    for name in ("a", "b"):
        await session.drop_adapter(name)


async def test_garbage_is_collected_though_each_adapter_takes_few_steps(session):
    await session.trainer.call(OpenTrainer.watch_collections)
    for name in ("a", "b", "c"):
        await session.create_adapter(name, CONFIG)
        await train(session, name, steps=2)
    assert await session.trainer.call(OpenTrainer.collections) == [[2, 2]] * 2
    for name in ("a", "b", "c"):
        await session.drop_adapter(name)


async def test_a_state_brings_an_adapter_back_after_the_trainer_was_lost(session, tmp_path):
    await session.create_adapter("a", CONFIG)
    await train(session, "a")
    await session.save_state(tmp_path / "state", adapter="a")
    digests = await session.trained_digests(adapter="a")
    await session.forward_backward(batch(), LOSS, adapter="a")
    after = [await session.optim_step(adapter="a"), await session.trained_digests(adapter="a")]
    assert after[1] != digests
    assert session.adapters == {"a": CONFIG}

    await session.trainer.stop()
    await session.start_models()
    assert session.adapters == {}
    with pytest.raises(ConfigError, match=r"adapter 'a' does not exist; the trainer has \[\]"):
        await session.forward(batch(), adapter="a")
    await session.create_adapter("a", CONFIG)
    await session.load_state(tmp_path / "state", adapter="a")
    assert await session.trained_digests(adapter="a") == digests
    await session.forward_backward(batch(), LOSS, adapter="a")
    metrics = await session.optim_step(adapter="a")
    of_host = dict.fromkeys(("memory/peak", "memory/resident"), 0)
    assert {**metrics} | of_host == {**after[0]} | of_host
    assert await session.trained_digests(adapter="a") == after[1]
    assert session.version == 0
    await session.connect()


async def test_the_state_of_the_policy_is_pushed_after_it_was_loaded(session, tmp_path):
    async with session.running():
        await session.save_state(tmp_path / "policy")
        await train(session, None)
        await session.push()
        assert session.version == 1
        await session.save_state(tmp_path / "trained")
        for name in ("policy", "trained"):  # both of version 0
            await session.load_state(tmp_path / name, optimizer=False)
            await session.reset_optimizer()
            assert session.version == 0
            await session.push()
            assert await difference(session, None, name) <= 1e-5
        await session.settle()
    await session.export_hf(tmp_path / "export", adapter=None)


async def test_what_a_session_cannot_do_with_adapters_is_refused(session, common):
    refused = {
        "the trainer has no adapters; set it": common.forward(batch(), weights="base"),
        "cannot have the name 'base'": session.create_adapter("base", CONFIG),
        "tied to the embedding": session.create_adapter("c", AdapterConfig(rank=4)),
        "adapter and weights are given": session.forward(batch(), adapter="c", weights="base"),
        "eps is 0": session.optim_step(adapter=next(iter(session.adapters)), eps=0),
        "eps is 1e-40; it must be at least 1e-30": session.optim_step(eps=1e-40),
        "reference has no adapters": session.forward(batch(), role="reference", weights="base"),
    }
    for message, call in refused.items():
        with pytest.raises(ConfigError, match=message):
            await call


async def test_snapshots_are_sampled_side_by_side(sessions, tmp_path):
    """More of them than a generator holds, one of which is missing, and after its loss. The weights
    under them are pushed once.
    """
    lora = LoRAConverter.Config(rank=4)
    session = await sessions.start(
        trainer=trainer_config(lora=lora),
        generator=GeneratorConfig(kv_cache_gib=0.05),
        max_loras=2,
    )
    await session.connect()
    pushes = session._push.state.pending.version
    async with session.running():
        for name, rank in (("a", 4), ("b", 2), ("c", 4)):
            await session.create_adapter(name, replace(CONFIG, rank=rank, mlp=name != "b"))
            await train(session, name)
            await session.save_snapshot(tmp_path / name, adapter=name)
            if name != "c":
                await session.drop_adapter(name)
        names = ["base", "a", "b", "c"]
        held = {name: name if name == "base" else tmp_path / name for name in names}
        for turn in (1, 2):
            found = await asyncio.gather(
                *(
                    difference(session, held[name], f"{name}/{turn}/{number}", weights=held[name])
                    for number in range(2)
                    for name in names
                )
            )
            assert max(found) <= 1e-5
        assert session._push.state.pending.version == pushes + 1
        with pytest.raises(ActorFailure, match="absent"):
            await difference(session, tmp_path / "absent", "absent")
        os.kill(pids_of(session.pool.meshes[0])[0], signal.SIGKILL)
        assert await difference(session, held["c"], "again", adapter="c") <= 1e-5
        assert await difference(session, held["b"], "other", adapter="c") > 1e-4
        assert await session.differing_weights() == []


def test_adapters_side_by_side_are_refused_by_field():
    lora = LoRAConverter.Config(rank=4)
    for fields, reason in (
        ({"trainer": trainer_config()}, "0 without trainer.lora"),
        ({"trainer": trainer_config(lora=lora), "parity": "bitwise"}, "0 with parity 'bitwise'"),
        ({"trainer": trainer_config(lora=lora), "model": EXPERTS}, "0 with adapters of experts"),
    ):
        config = config_of(max_loras=2, **fields)
        with pytest.raises(ConfigError, match=f"max_loras is 2; it must be {reason}"):
            config.adapters  # noqa: B018
    assert config_of(trainer=trainer_config(lora=lora)).adapters is None
