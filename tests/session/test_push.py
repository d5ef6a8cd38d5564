"""The push between real meshes: its checks find wrong weights, and it overlaps with training."""

import asyncio
from dataclasses import replace

import pytest
import torch

from rl.actors.policy_trainer import PolicyTrainer
from rl.algorithms.losses import grpo
from rl.errors import ActorFailure, RunError
from rl.generation.generator_config import GeneratorConfig
from rl.model.digest import merge_digests
from rl.session.session import Session
from rl.types import GenerationRequest, Sampling
from rl.weights.transport import WeightPushConfig
from tests.session import faults
from tests.session.sessions import DEADLINES, Sessions, batch, trainer_config
from tests.session.test_layouts import assert_equal_weights

FIRST = "layers.0.feed_forward.w2.weight"
OTHER = "layers.1.feed_forward.w2.weight"
NORM = "layers.0.attention_norm.weight"
OTHER_NORM = "layers.1.attention_norm.weight"
DIGESTS = {"digests": True, "canary_tolerance": 0.0}
CANARY = {"digests": False}
BOTH = {"digests": True}


@pytest.fixture(scope="module")
def trainer(common):
    return common.trainer


@pytest.fixture(scope="module")
def generator(common):
    return common.pool.meshes[0]


async def connected(
    sessions: Sessions, trainer, generator, weights: dict, dtype: str = "float32"
) -> Session:
    session = sessions.on(
        trainer,
        generator,
        longest=72,
        generator=GeneratorConfig(dtype=dtype),
        weights=WeightPushConfig(**weights),
    )
    await session.connect()
    return session


async def push(session) -> None:
    async with session.running():
        await session.push()
        await session.settle()


async def train(trainer) -> None:
    await trainer.forward_backward(batch(), grpo(entropy_coef=0.01))
    await trainer.optim_step()


async def ask(mesh, endpoint: str, *args, rank: int | None = None):
    ranks = mesh._group.on(rank, timeout_s=DEADLINES.call)
    return await ranks.call(getattr(mesh.actor, endpoint), *args)


async def whole_digests(mesh) -> dict[str, str]:
    return merge_digests(await mesh.weight_digests())


async def test_answers_may_take_longer_than_the_deadline_of_a_call(sessions, generator):
    request = GenerationRequest(
        request_id="long", prompt_tokens=[1], seed=0, sampling=Sampling(max_tokens=16)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generator, "deadlines", replace(DEADLINES, call=1.0))
        await ask(generator, "change", faults.slow_down)
        (completion,) = await generator.generate([request])
    await ask(generator, "change", faults.speed_up)
    assert len(completion.tokens) == 16


async def test_push_metrics(sessions, trainer, generator):
    session = await connected(sessions, trainer, generator, BOTH)
    for _ in range(3):
        await push(session)
        await assert_equal_weights(trainer, generator)
        await train(trainer)
    metrics = session.push_metrics
    assert metrics["push/bytes"] == metrics["push/bytes_sent"] > 100_000
    assert 0 <= metrics["push/canary"] < 1e-4
    assert metrics["timing/push_pause"] > 0
    assert "push/update_kept" not in metrics  # generators in float32 get the whole update


async def test_collectives_outlast_the_deadlines_of_calls(sessions, trainer, generator):
    for mesh in (trainer, generator):
        timeouts = await ask(mesh, "collective_timeout")
        assert {*timeouts} == {DEADLINES.start + DEADLINES.call}


@pytest.mark.parametrize("weights", [DIGESTS, CANARY], ids=["digests", "canary"])
@pytest.mark.parametrize("fault", ["skipped parameter", "swapped slice"])
async def test_weights_that_differ_are_named(sessions, trainer, generator, fault, weights):
    session = await connected(sessions, trainer, generator, weights)
    await push(session)
    if fault == "skipped parameter":
        await ask(trainer, "skip", FIRST, rank=1)
    else:
        await ask(generator, "cross", FIRST, OTHER, rank=1)
    await train(trainer)
    with pytest.raises(RunError) as error:
        await push(session)
    message = str(error.value)
    wrong = 1 if fault == "skipped parameter" else 2
    assert message.startswith(f"push of policy version {trainer.version}: {wrong} of ")
    assert message.endswith(
        f"parameters of {generator.name} differ from the trainer's; the first is {FIRST}"
    )
    assert ("push/canary" in session.push_metrics) == (weights is CANARY)


@pytest.mark.long
async def test_only_digests_find_old_weights_in_bf16(sessions, trainer):
    config = GeneratorConfig(dtype="bfloat16", kv_cache_gib=0.05)
    generator = await sessions.start_mesh(sessions.meshes(generator=config).generator(1))
    for weights in (CANARY, {}):
        session = await connected(sessions, trainer, generator, weights, "bfloat16")
        await push(session)
        await ask(trainer, "skip")
        await train(trainer)
        if weights == CANARY:
            await push(session)
            assert 0 < session.push_metrics["push/update_kept"] < 2
        else:
            found = (
                rf"push of policy version {trainer.version}: \d+ of \d+ parameters of "
                rf"{generator.name} differ"
            )
            with pytest.raises(RunError, match=found):
                await push(session)
    await generator.close()


async def test_ranks_with_different_copies_are_found(sessions, trainer, generator):
    session = await connected(sessions, trainer, generator, DIGESTS)
    await ask(generator, "cross", NORM, OTHER_NORM, rank=1)
    await train(trainer)
    wrong = f"version {trainer.version}: {generator.name}: parameter {NORM}: two ranks hold"
    with pytest.raises(RunError, match=wrong):
        await push(session)


async def test_canary_finds_a_stale_prefix_cache(sessions, trainer, generator):
    session = await connected(sessions, trainer, generator, BOTH)
    await push(session)
    await ask(generator, "honour_reset", False)
    await train(trainer)
    wrong = (
        f"canary of policy version {trainer.version}: a log-prob of {generator.name} differs by .*"
        " all parameters are equal, so a cache of older weights"
    )
    with pytest.raises(RunError, match=wrong):
        await push(session)
    await ask(generator, "honour_reset", True)
    await train(trainer)
    await push(session)


async def test_generator_in_another_dtype_is_refused(sessions, trainer, generator):
    generator.dtype = torch.bfloat16  # the dtype that the trainer pushes
    wrong = "tok_embeddings.weight is torch.float32 in the generator and pushed as torch.bfloat16"
    try:
        with pytest.raises(RunError, match=wrong):
            await connected(sessions, trainer, generator, BOTH)
    finally:
        generator.dtype = torch.float32


async def test_offloaded_model_is_not_pushed(sessions, trainer, generator):
    await connected(sessions, trainer, generator, DIGESTS)
    await trainer.offload()
    away = "trainer rank ., push_weights: .*the model is offloaded; call onload"
    with pytest.raises(RunError, match=away):
        await trainer.call(PolicyTrainer.push_weights, trainer.version)
    await trainer.onload()


@pytest.mark.parametrize("first", ["push_weights", "forward_backward"])
async def test_publish_and_forward_backward_overlap(sessions, trainer, generator, first):
    """Each call ends only after the other has begun."""
    await connected(sessions, trainer, generator, DIGESTS)
    await ask(trainer, "publish_only_behind", "forward_backward", 60.0)
    calls = [
        trainer.call(PolicyTrainer.push_weights, trainer.version),
        trainer.forward_backward(batch(), grpo(entropy_coef=0.01)),
    ]
    await asyncio.gather(*(calls if first == "push_weights" else reversed(calls)))
    assert await ask(trainer, "was_behind") == [True] * 4
    await trainer.optim_step()


async def test_optim_step_waits_for_a_publish(sessions, trainer, generator):
    """Calls that come later wait for the step."""
    await connected(sessions, trainer, generator, DIGESTS)
    await train(trainer)
    await trainer.forward_backward(batch(), grpo(entropy_coef=0.01))
    before = await whole_digests(trainer)
    version = trainer.version
    await ask(trainer, "publish_only_behind", "optim_step", 0.5)
    _, _, after = await asyncio.gather(
        trainer.call(PolicyTrainer.push_weights, trainer.version),
        trainer.optim_step(),
        whole_digests(trainer),
    )
    assert await ask(trainer, "was_behind") == [False] * 4
    assert trainer.version == version + 1
    await generator.pull_weights(version)
    assert await whole_digests(generator) == before
    assert after != before
    assert after == await whole_digests(trainer)


async def test_connecting_again_leaves_no_memory(sessions, trainer, generator):
    held = []
    for _ in range(3):
        await connected(sessions, trainer, generator, DIGESTS)
        held.append([*await ask(trainer, "segments"), *await ask(generator, "segments")])
    assert held[0] == held[1] == held[2]
    assert min(held[0]) > 0


def request(name: str, prompt: list[int], *, most: int = 8) -> GenerationRequest:
    sampling = Sampling(max_tokens=most, temperature=0.0)
    return GenerationRequest(request_id=name, prompt_tokens=prompt, seed=0, sampling=sampling)


async def test_prefixes_are_forgotten_on_every_rank(sessions, trainer, generator):
    session = await connected(sessions, trainer, generator, DIGESTS)
    (first,) = await session.sample([request("first", list(range(40)))])
    assert min(await ask(generator, "cached_blocks")) > 0
    await session.sample([request("again", [1, 2, 3])], alone=True)
    assert await ask(generator, "cached_blocks") == [0, 0]
    (same,) = await session.sample([request("same", list(range(40)))])
    assert same.tokens == first.tokens


async def test_an_abort_ends_one_request_alone(sessions, trainer, generator):
    session = await connected(sessions, trainer, generator, DIGESTS)
    (alone,) = await session.sample([request("alone", [1, 2, 3], most=90)])
    kept, dropped = (
        asyncio.ensure_future(session.sample([request(name, [1, 2, 3], most=90)]))
        for name in ("kept", "dropped")
    )
    while not dropped.done():
        await session.abort("dropped", "another")
    with pytest.raises(ActorFailure, match="the request was aborted"):
        await dropped
    ((found,), (again,)) = await asyncio.gather(kept, session.sample([request("dropped", [1])]))
    assert found.tokens == alone.tokens
    assert len(again.tokens) == 8


async def test_a_generator_that_left_its_device_loads_its_version_again(
    sessions, trainer, generator
):
    session = await connected(sessions, trainer, generator, DIGESTS)
    before = await whole_digests(generator)
    version = generator.version
    (first,) = await session.sample([request("first", [1, 2, 3])], alone=True)
    await generator.offload()
    await generator.onload(model=False)
    assert await whole_digests(generator) != before
    await generator.onload()
    assert await whole_digests(generator) == before
    assert generator.version == version
    (again,) = await session.sample([request("again", [1, 2, 3])], alone=True)
    assert again == first


async def test_another_trainer_with_a_lower_version_takes_over(sessions, trainer, generator):
    session = await connected(sessions, trainer, generator, BOTH)
    await train(trainer)
    await push(session)
    meshes = sessions.meshes(trainer=trainer_config())
    another = await sessions.start_mesh(meshes.models()["trainer"])
    session = await connected(sessions, another, generator, BOTH)
    await push(session)
    assert trainer.version > another.version == generator.version == 0
    await assert_equal_weights(another, generator)
    # As for a trainer that came back with the version pushed last.
    await session.connect()
    await push(session)
    assert generator.version == 0
    await another.close()
