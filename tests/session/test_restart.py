"""A mesh that lost a rank names it, ends its processes, and restarts with equal results."""

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rl.actors.mesh import Rank
from rl.algorithms.losses import grpo
from rl.errors import ActorFailure, RankLost
from rl.generation.generator_config import GeneratorConfig
from rl.types import Completion, GenerationRequest, Sampling
from tests.kit.processes import assert_ended, failure_of, pids_of, stop
from tests.kit.tables import long
from tests.session.sessions import DEADLINES, PROMPTS, batch, trainer_config

SAMPLING = Sampling(max_tokens=16, temperature=1.0)
REQUESTS = [
    GenerationRequest(request_id=str(seed), prompt_tokens=prompt, seed=seed, sampling=SAMPLING)
    for seed, prompt in enumerate(PROMPTS)
]


TRAINER = {"trainer": trainer_config(fsdp=2)}
BOTH = TRAINER | {"generator": GeneratorConfig(tensor_parallel_degree=2, kv_cache_gib=0.05)}


@pytest.fixture(
    scope="module",
    params=[TRAINER, long(BOTH)],
    ids=["trainer", "both"],
)
def session(sessions, request):
    """Two trainer ranks, and in the long case two generator ranks, with short heartbeats."""
    deadlines = replace(DEADLINES, heartbeat=8.0)
    return sessions.run(sessions.start(**request.param, deadlines=deadlines))


async def lose(mesh, call, signal_number: int) -> list[ActorFailure]:
    """Return failures of a pending call when rank 1 gets the signal, and of a later one."""
    stop(pids_of(mesh)[1])  # so that the call is pending for certain
    pending = asyncio.ensure_future(failure_of(call))
    await asyncio.sleep(0.2)
    assert not pending.done()
    if signal_number != signal.SIGSTOP:
        os.kill(pids_of(mesh)[1], signal_number)
    return [await pending, await mesh.failed(), await failure_of(mesh.call(Rank.layout))]


async def lose_all(session, signal_number: int) -> list[ActorFailure]:
    """Return the failure of each mesh, the trainer's first, after all were stopped."""
    meshes = [session.trainer, *session.pool.meshes]
    calls = [session.trainer.forward(batch())]
    calls += [generator.generate(REQUESTS) for generator in session.pool.meshes]
    pids = [pid for mesh in meshes for pid in pids_of(mesh)]
    lost = await asyncio.gather(
        *(lose(mesh, call, signal_number) for mesh, call in zip(meshes, calls, strict=True))
    )
    for failures in lost:
        assert {str(failure) for failure in failures} == {str(failures[0])}
        assert (failures[0].rank, type(failures[0])) == (1, RankLost)
    await session.stop()
    await assert_ended(pids)
    return [failures[0] for failures in lost]


async def test_restart_after_a_killed_rank(session):
    async def computed(session) -> tuple[torch.Tensor, list[Completion]]:
        """Return log-probs and samples after one step from the first weights."""
        await session.connect()
        async with session.running():
            await session.forward_backward(batch(), grpo(entropy_coef=0.01))
            await session.optim_step()
            outputs = await session.forward(batch())
            if not session.pool.meshes:
                return outputs["logprobs"], []
            await session.push()
            return outputs["logprobs"], await session.sample(REQUESTS)

    before = await computed(session)
    ours, *theirs = await lose_all(session, signal.SIGKILL)
    assert str(ours).startswith("trainer rank 1, forward: the process died\n")
    for failure in theirs:
        assert str(failure).startswith("generator-0 rank 1, serve: the process died\n")
    await session.start()
    assert session.trainer.version == 0
    assert [generator.version for generator in session.pool.meshes] == [None] * len(theirs)
    after = await computed(session)
    assert torch.equal(after[0], before[0])
    assert after[1] == before[1]


async def test_stopped_ranks_are_named_and_ended(session):
    left = [
        Path(f"/dev/shm/{generator._group.port}-tp:0-[0-1]-cpushm_1")
        for generator in session.pool.meshes
    ]
    for path in left:
        path.touch()
    names = ["trainer", *(generator.name for generator in session.pool.meshes)]
    failures = await lose_all(session, signal.SIGSTOP)
    assert [str(failure) for failure in failures] == [
        f"{name} rank 1, heartbeat: no answer within 8 s" for name in names
    ]
    assert not any(path.exists() for path in left)
