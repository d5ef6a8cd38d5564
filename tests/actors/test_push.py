"""The push between real meshes: checked as configured, behind the trainer's work, and never of the
wrong weights.
"""

import asyncio

import pytest
import torch

from rl.algorithms.losses import grpo
from rl.errors import RunError
from rl.generation.config import GeneratorConfig
from rl.observe.spans import Stopwatch
from rl.session.concurrency import background
from rl.session.config import SessionConfig
from rl.session.push import WeightPush
from rl.session.residency import Residency
from rl.types import GenerationRequest, Sampling
from rl.weights.config import WeightPushConfig
from rl.weights.digest import merge_digests
from tests.actors.meshes import DEADLINE, DEADLINES, connect, trainer_config
from tests.actors.test_layouts import assert_equal_weights, batch, model_config

FIRST = "layers.0.feed_forward.w2.weight"
OTHER = "layers.1.feed_forward.w2.weight"
NORM = "layers.0.attention_norm.weight"
OTHER_NORM = "layers.1.attention_norm.weight"
DIGESTS = {"digests": True, "canary_tolerance": 0.0}
CANARY = {"digests": False}
BOTH = {"digests": True}


@pytest.fixture(scope="module")
def pair(meshes):
    """Two trainer ranks and the two ranks of a generator, whose KV blocks are smaller than the
    canary's prompt.
    """
    generator = GeneratorConfig(tensor_parallel_degree=2, kv_cache_gib=0.05, block_size=32)

    async def start():
        return await asyncio.gather(
            meshes.trainer(trainer_config(fsdp=2), model_config(tied=True), steps=100),
            meshes.generator(generator, model_config(tied=True)),
        )

    return meshes.run(start())


def make_push(trainer, generator, weights: dict, dtype: str = "float32") -> WeightPush:
    config = SessionConfig(
        model=model_config(tied=True),
        longest=72,
        generator=GeneratorConfig(block_size=32, dtype=dtype),
        weights=WeightPushConfig(**weights),
    )
    return WeightPush(config, trainer, Residency(), Stopwatch(), print)


async def pushed(push: WeightPush, trainer) -> None:
    """Bring what the trainer has."""
    async with background(push.run()):
        await push.wait(push.start())
        await push.settle()


async def first_push(trainer, generator, weights: dict, dtype: str = "float32") -> WeightPush:
    push = make_push(trainer, generator, weights, dtype)
    await push.connect([generator])
    await pushed(push, trainer)
    return push


async def trained(trainer) -> None:
    await trainer.forward_backward(batch(), grpo(entropy_coef=0.01))
    await trainer.optim_step()


async def ask(mesh, endpoint: str, *args, rank: int | None = None):
    return await mesh._group.call(endpoint, *args, rank=rank, deadline=DEADLINE)


async def whole_digests(mesh) -> dict[str, str]:
    return merge_digests(await mesh.weight_digests())


def test_a_push_without_faults_passes_and_tells_what_it_moved(meshes, pair):
    trainer, generator = pair

    async def check():
        push = make_push(trainer, generator, BOTH)
        await push.connect([generator])
        for _ in range(3):
            await pushed(push, trainer)
            await assert_equal_weights(trainer, [generator])
            await trained(trainer)
        return push.metrics

    metrics = meshes.run(check())
    assert metrics["push/bytes"] == metrics["push/bytes_sent"] > 100_000
    assert 0 <= metrics["push/canary"] < 1e-4
    assert 0 < metrics["timing/push_pause"] < 10


def test_collectives_outlast_the_deadlines_of_calls(meshes, pair):
    async def check():
        return [await ask(mesh, "collective_timeout") for mesh in pair]

    assert meshes.run(check()) == [[DEADLINES.start + DEADLINES.call] * 2] * 2


@pytest.mark.parametrize("weights", [DIGESTS, CANARY], ids=["digests", "canary"])
@pytest.mark.parametrize("fault", ["skipped parameter", "swapped slice"])
def test_weights_that_differ_are_found_at_that_push_and_the_first_is_named(
    meshes, pair, fault, weights
):
    trainer, generator = pair

    async def check():
        push = await first_push(trainer, generator, weights)
        if fault == "skipped parameter":
            await ask(trainer, "skip", FIRST, rank=1)
        else:
            await ask(generator, "cross", FIRST, OTHER, rank=1)
        await trained(trainer)
        with pytest.raises(RunError) as error:
            await pushed(push, trainer)
        return str(error.value), push

    message, push = meshes.run(check())
    wrong = 1 if fault == "skipped parameter" else 2
    assert message.startswith(f"push of policy version {trainer.version}: {wrong} of ")
    assert message.endswith(
        f"parameters of {generator.name} differ from the trainer's; the first is {FIRST}"
    )
    assert ("push/canary" in push.metrics) == (weights is CANARY)


def test_a_bf16_generator_left_one_version_behind_is_found_by_default_and_not_by_the_canary(
    meshes, pair
):
    trainer, _ = pair

    async def check():
        config = GeneratorConfig(dtype="bfloat16", kv_cache_gib=0.05, block_size=32)
        generator = await meshes.generator(config, model_config(tied=True))
        for weights in (CANARY, {}):
            push = await first_push(trainer, generator, weights, "bfloat16")
            await ask(trainer, "skip")
            await trained(trainer)
            if weights == CANARY:
                await pushed(push, trainer)
            else:
                found = (
                    rf"push of policy version {trainer.version}: \d+ of \d+ parameters of "
                    rf"{generator.name} differ"
                )
                with pytest.raises(RunError, match=found):
                    await pushed(push, trainer)
        await meshes.stop(generator)

    meshes.run(check())


def test_ranks_of_a_generator_that_hold_different_copies_are_found_and_the_parameter_is_named(
    meshes, pair
):
    trainer, generator = pair

    async def check():
        push = make_push(trainer, generator, DIGESTS)
        await push.connect([generator])
        await ask(generator, "cross", NORM, OTHER_NORM, rank=1)
        await trained(trainer)
        wrong = f"version {trainer.version}: {generator.name}: parameter {NORM}: two ranks hold"
        with pytest.raises(RunError, match=wrong):
            await pushed(push, trainer)

    meshes.run(check())


def test_the_canary_finds_a_stale_prefix_cache_and_says_that_the_weights_are_right(meshes, pair):
    trainer, generator = pair

    async def check():
        push = await first_push(trainer, generator, BOTH)
        await ask(generator, "honour_reset", False)
        await trained(trainer)
        wrong = (
            f"canary of policy version {trainer.version}: a log-prob of {generator.name} differs "
            "by .*"
        )
        with pytest.raises(
            RunError, match=f"{wrong} all parameters are equal, so a cache of older weights"
        ):
            await pushed(push, trainer)
        await ask(generator, "honour_reset", True)
        await trained(trainer)
        await pushed(push, trainer)

    meshes.run(check())


def test_a_generator_in_another_dtype_is_refused_before_anything_is_pushed(meshes, pair):
    trainer, generator = pair

    async def check():
        generator.dtype = torch.bfloat16  # what the trainer is told to push
        try:
            with pytest.raises(
                RunError,
                match="tok_embeddings.weight is torch.float32 in the "
                "generator and pushed as "
                "torch.bfloat16",
            ):
                await make_push(trainer, generator, BOTH).connect([generator])
        finally:
            generator.dtype = torch.float32

    meshes.run(check())


@pytest.mark.parametrize("first", ["push_weights", "forward_backward"])
def test_publish_and_forward_backward_run_at_the_same_time_whichever_was_asked_for_first(
    meshes, pair, first
):
    """Each ends only when the other has begun."""
    trainer, generator = pair

    async def check():
        await connect(trainer, generator)
        await ask(trainer, "publish_only_behind", "forward_backward", 60.0)
        calls = [trainer.push_weights(), trainer.forward_backward(batch(), grpo(entropy_coef=0.01))]
        await asyncio.gather(*(calls if first == "push_weights" else reversed(calls)))
        assert await ask(trainer, "was_behind") == [True, True]
        await trainer.optim_step()

    meshes.run(check())


def test_an_optimizer_step_asked_for_at_once_waits_for_the_push_and_later_calls_wait_for_the_step(
    meshes, pair
):
    trainer, generator = pair

    async def check():
        await connect(trainer, generator)
        await trainer.forward_backward(batch(), grpo(entropy_coef=0.01))
        before = await whole_digests(trainer)
        version = trainer.version
        await ask(trainer, "publish_only_behind", "optim_step", 0.5)
        (published, _), _, after = await asyncio.gather(
            trainer.push_weights(), trainer.optim_step(), whole_digests(trainer)
        )
        assert await ask(trainer, "was_behind") == [False, False]
        assert (published, trainer.version) == (version, version + 1)
        await generator.pull_weights(version)
        assert await whole_digests(generator) == before
        assert after != before
        assert after == await whole_digests(trainer)

    meshes.run(check())


def test_connecting_again_leaves_no_memory_of_the_push_before(meshes, pair):
    trainer, generator = pair

    async def check():
        held = []
        for _ in range(3):
            await connect(trainer, generator)
            held.append([*await ask(trainer, "segments"), *await ask(generator, "segments")])
        assert held[0] == held[1] == held[2]
        assert min(held[0]) > 0

    meshes.run(check())


def request(name: str, prompt: list[int]) -> GenerationRequest:
    sampling = Sampling(max_tokens=8, temperature=0.0)
    return GenerationRequest(request_id=name, prompt_tokens=prompt, seed=0, sampling=sampling)


def test_prefixes_are_forgotten_on_every_rank_when_asked(meshes, pair):
    trainer, generator = pair

    async def check():
        await connect(trainer, generator)
        version, _ = await trainer.push_weights()
        await generator.pull_weights(version)
        (first,) = await generator.generate([request("first", list(range(40)))])
        assert min(await ask(generator, "cached_blocks")) > 0
        await generator.generate([request("again", [1, 2, 3])], fresh=True)
        assert await ask(generator, "cached_blocks") == [0, 0]
        (same,) = await generator.generate([request("same", list(range(40)))])
        assert same.tokens == first.tokens

    meshes.run(check())


def test_another_trainer_with_a_lower_version_takes_over(meshes, pair):
    trainer, generator = pair

    async def check():
        push = make_push(trainer, generator, BOTH)
        await push.connect([generator])
        await trained(trainer)
        await pushed(push, trainer)
        another = await meshes.trainer(trainer_config(), model_config(tied=True))
        push = make_push(another, generator, BOTH)
        await push.connect([generator])
        await pushed(push, another)
        assert trainer.version > another.version == generator.version == 0
        await assert_equal_weights(another, [generator])
        # As for a trainer that came back with the version pushed last.
        await push.connect([generator])
        await pushed(push, another)
        assert generator.version == 0
        await meshes.stop(another)

    meshes.run(check())


def test_a_slot_whose_writer_ended_in_the_middle_is_refused_by_the_pull(meshes, pair):
    """Last: it ends the generator."""
    trainer, generator = pair

    async def check():
        push = await first_push(trainer, generator, BOTH)
        await ask(trainer, "tear", rank=1)
        await trained(trainer)
        version = trainer.version
        held = (
            rf"trainer rank 0 holds \[{version - 1}, {version}\]; trainer rank 1 holds "
            rf"\[{version - 1}\]"
        )
        with pytest.raises(RunError, match=f"pull of version {version}: {held}"):
            await pushed(push, trainer)

    meshes.run(check())
