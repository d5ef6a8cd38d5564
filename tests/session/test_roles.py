"""Groups of different sizes take the same batches, whatever their number of sequences."""

import asyncio

import pytest
import torch

from rl.algorithms.losses import grpo
from rl.errors import ActorFailure
from rl.session.config import Role
from tests.session.sessions import batch, model_config, on_its_loop, trainer_config


@pytest.fixture(scope="module")
def session(sessions):
    """A policy of one rank, a reference of two, from the same seed."""
    reference = Role("reference", trainer_config(fsdp=2), model_config(tied=True))
    roles = {"reference": reference}
    return sessions.run(sessions.start(trainer=trainer_config(), roles=roles))


@on_its_loop
async def test_groups_of_different_sizes_agree(sessions, session):
    for count in range(1, len(batch()) + 1):
        shard = batch().select(list(range(count)))
        one, two = await asyncio.gather(
            *(
                session.forward(shard, role=role, temperature=0.7)
                for role in ("trainer", "reference")
            )
        )
        for name, values in one.items():
            assert len(values) == len(shard.tokens)
            torch.testing.assert_close(values, two[name], atol=1e-5, rtol=0)


@on_its_loop
async def test_failing_rank_is_named(sessions, session):
    broken = batch()
    broken.tokens[0] = 10**6  # no such word
    with pytest.raises(
        ActorFailure, match=r"reference rank \d, forward_backward: IndexError"
    ) as error:
        await session.forward_backward(broken, grpo(), role="reference")
    assert (error.value.actor, error.value.call, error.value.kind) == (
        "reference",
        "forward_backward",
        "raised",
    )
