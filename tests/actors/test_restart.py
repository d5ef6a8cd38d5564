"""A mesh that lost a rank says which at once, ends all its processes, and starts again as
it was.
"""

import asyncio
import os
import signal
from pathlib import Path

import pytest
import torch

from rl.algorithms.losses import grpo
from rl.errors import ActorFailure, RankLost
from rl.generation.config import GeneratorConfig
from rl.types import Completion, GenerationRequest, Sampling
from tests.actors.meshes import connect, trainer_config
from tests.actors.processes import assert_ended, pids_of
from tests.actors.test_layouts import PROMPTS, batch, model_config

SAMPLING = Sampling(max_tokens=16, temperature=1.0)
REQUESTS = [
    GenerationRequest(request_id=str(seed), prompt_tokens=prompt, seed=seed, sampling=SAMPLING)
    for seed, prompt in enumerate(PROMPTS)
]


@pytest.fixture(scope="module")
def pair(meshes):
    """Two trainer ranks and the two ranks of a generator, each with a heartbeat of a few
    seconds.
    """
    generator = GeneratorConfig(tensor_parallel_degree=2, kv_cache_gib=0.05)

    async def start():
        return await asyncio.gather(
            meshes.trainer(trainer_config(fsdp=2), model_config(tied=True), heartbeat=8.0),
            meshes.generator(generator, model_config(tied=True), heartbeat=8.0),
        )

    return meshes.run(start())


async def failure_of(coroutine) -> ActorFailure:
    with pytest.raises(ActorFailure) as error:
        await coroutine
    return error.value


async def pull(trainer, generator) -> None:
    version, _ = await trainer.push_weights()
    await generator.pull_weights(version)


async def computed(trainer, generator) -> tuple[torch.Tensor, list[Completion]]:
    """What they compute from their first weights, one step included."""
    await connect(trainer, generator)
    await trainer.forward_backward(batch(), grpo(entropy_coef=0.01))
    await trainer.optim_step()
    await pull(trainer, generator)
    outputs = await trainer.forward(batch())
    return outputs["logprobs"], await generator.generate(REQUESTS)


async def lose(mesh, call, signal_number: int) -> list[ActorFailure]:
    """Of a call that is pending when rank 1 gets the signal, of the mesh, and of a later call."""
    os.kill(pids_of(mesh)[1], signal.SIGSTOP)  # so that the call is pending for certain
    pending = asyncio.ensure_future(failure_of(call))
    await asyncio.sleep(0.2)
    assert not pending.done()
    if signal_number != signal.SIGSTOP:
        os.kill(pids_of(mesh)[1], signal_number)
    return [await pending, await mesh.failed(), await failure_of(mesh.layouts())]


async def lose_both(trainer, generator, signal_number: int) -> tuple[ActorFailure, ActorFailure]:
    """Their failures, after both were stopped."""
    pids = [*pids_of(trainer), *pids_of(generator)]
    ours, theirs = await asyncio.gather(
        lose(trainer, trainer.forward(batch()), signal_number),
        lose(generator, generator.generate(REQUESTS), signal_number),
    )
    for failures in (ours, theirs):
        assert {str(failure) for failure in failures} == {str(failures[0])}
        assert (failures[0].rank, type(failures[0])) == (1, RankLost)
    await asyncio.gather(trainer.stop(), generator.stop())
    await assert_ended(pids)
    return ours[0], theirs[0]


def test_meshes_that_lost_a_rank_name_it_and_compute_the_same_after_a_restart(meshes, pair):
    trainer, generator = pair

    async def check():
        before = await computed(trainer, generator)
        ours, theirs = await lose_both(trainer, generator, signal.SIGKILL)
        assert str(ours).startswith("trainer rank 1, forward: the process died\n")
        assert str(theirs).startswith(f"{generator.name} rank 1, serve: the process died\n")
        await asyncio.gather(meshes.start(trainer), meshes.start(generator))
        assert (trainer.version, generator.version) == (0, None)
        after = await computed(trainer, generator)
        assert torch.equal(after[0], before[0])
        assert after[1] == before[1]

    meshes.run(check())


def test_ranks_that_are_stopped_are_named_and_ended_with_what_their_start_may_have_left(
    meshes, pair
):
    trainer, generator = pair

    async def check():
        left = Path(f"/dev/shm/{generator._group.port}-tp:0-[0-1]-cpushm_1")
        left.touch()
        ours, theirs = await lose_both(trainer, generator, signal.SIGSTOP)
        assert str(ours) == "trainer rank 1, heartbeat: no answer within 8 s"
        assert str(theirs) == f"{generator.name} rank 1, heartbeat: no answer within 8 s"
        assert not left.exists()

    meshes.run(check())
