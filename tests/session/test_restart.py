"""A mesh that lost a rank names it at once, ends all its processes, and restarts with the same
results.
"""

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rl.algorithms.losses import grpo
from rl.errors import ActorFailure, RankLost
from rl.generation.config import GeneratorConfig
from rl.types import Completion, GenerationRequest, Sampling
from tests.actors.processes import assert_ended, pids_of
from tests.session.sessions import DEADLINES, PROMPTS, batch, on_its_loop, trainer_config

SAMPLING = Sampling(max_tokens=16, temperature=1.0)
REQUESTS = [
    GenerationRequest(request_id=str(seed), prompt_tokens=prompt, seed=seed, sampling=SAMPLING)
    for seed, prompt in enumerate(PROMPTS)
]


@pytest.fixture(scope="module")
def session(sessions):
    """Two trainer ranks and the two ranks of a generator, each with a heartbeat of a few
    seconds.
    """
    return sessions.run(
        sessions.start(
            trainer=trainer_config(fsdp=2),
            generator=GeneratorConfig(tensor_parallel_degree=2, kv_cache_gib=0.05),
            deadlines=replace(DEADLINES, heartbeat=8.0),
        )
    )


async def failure_of(coroutine) -> ActorFailure:
    with pytest.raises(ActorFailure) as error:
        await coroutine
    return error.value


async def computed(session) -> tuple[torch.Tensor, list[Completion]]:
    """Return log-probs and samples after one step from the first weights."""
    await session.connect()
    async with session.running():
        await session.forward_backward(batch(), grpo(entropy_coef=0.01))
        await session.optim_step()
        await session.push()
        outputs = await session.forward(batch())
        return outputs["logprobs"], await session.sample(REQUESTS)


async def lose(mesh, call, signal_number: int) -> list[ActorFailure]:
    """Return the failures of a call that is pending when rank 1 gets the signal, of the mesh, and
    of a later call.
    """
    os.kill(pids_of(mesh)[1], signal.SIGSTOP)  # so that the call is pending for certain
    pending = asyncio.ensure_future(failure_of(call))
    await asyncio.sleep(0.2)
    assert not pending.done()
    if signal_number != signal.SIGSTOP:
        os.kill(pids_of(mesh)[1], signal_number)
    return [await pending, await mesh.failed(), await failure_of(mesh.layouts())]


async def lose_both(session, signal_number: int) -> tuple[ActorFailure, ActorFailure]:
    """Return their failures, after both were stopped."""
    trainer = session.trainer
    (generator,) = session.pool.meshes
    pids = [*pids_of(trainer), *pids_of(generator)]
    ours, theirs = await asyncio.gather(
        lose(trainer, trainer.forward(batch()), signal_number),
        lose(generator, generator.generate(REQUESTS), signal_number),
    )
    for failures in (ours, theirs):
        assert {str(failure) for failure in failures} == {str(failures[0])}
        assert (failures[0].rank, type(failures[0])) == (1, RankLost)
    await session.stop()
    await assert_ended(pids)
    return ours[0], theirs[0]


@on_its_loop
async def test_restart_after_a_killed_rank(sessions, session):
    trainer = session.trainer
    (generator,) = session.pool.meshes
    before = await computed(session)
    ours, theirs = await lose_both(session, signal.SIGKILL)
    assert str(ours).startswith("trainer rank 1, forward: the process died\n")
    assert str(theirs).startswith(f"{generator.name} rank 1, serve: the process died\n")
    await session.start()
    assert (trainer.version, generator.version) == (0, None)
    after = await computed(session)
    assert torch.equal(after[0], before[0])
    assert after[1] == before[1]


@on_its_loop
async def test_stopped_ranks_are_named_and_ended(sessions, session):
    (generator,) = session.pool.meshes
    left = Path(f"/dev/shm/{generator._group.port}-tp:0-[0-1]-cpushm_1")
    left.touch()
    ours, theirs = await lose_both(session, signal.SIGSTOP)
    assert str(ours) == "trainer rank 1, heartbeat: no answer within 8 s"
    assert str(theirs) == f"{generator.name} rank 1, heartbeat: no answer within 8 s"
    assert not left.exists()
