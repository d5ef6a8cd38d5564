"""Groups of different sizes take the same batches, whatever their number of sequences."""

import asyncio
import math

import pytest
import torch

from rl.algorithms.losses import grpo
from rl.algorithms.sequence_losses import DPOLoss, Labels
from rl.algorithms.sequence_scores import (
    LinearLoss,
    coefficients,
    score_batch,
    sequence_scores,
    with_coefficients,
)
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
async def test_dpo_starts_at_the_reference_and_learns_what_was_chosen(sessions, session):
    loss = DPOLoss.Config(beta=0.5).build()
    pairs = score_batch(batch().select([0, 1, 2, 3]), loss)
    labels = Labels.pairs(2)
    rows = []
    for _ in range(4):
        policy, reference = [
            await session.forward(pairs, role=role) for role in ("trainer", "reference")
        ]
        values, _, metrics = coefficients(
            loss,
            sequence_scores(pairs, policy["logprobs"]),
            sequence_scores(pairs, reference["logprobs"]),
            labels,
        )
        await session.forward_backward(with_coefficients(pairs, values), LinearLoss.Config())
        rows.append(await session.optim_step(denominator=loss.count(labels)) | metrics)
    assert rows[0]["loss/mean"] == pytest.approx(math.log(2), rel=1e-5)
    assert rows[0]["trainer/weight"] == 2
    assert rows[-1]["loss/mean"] < 0.5
    assert rows[-1]["rewards/accuracy"] == 1


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
