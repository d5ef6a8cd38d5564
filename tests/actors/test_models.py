"""Groups of different sizes take the same batches, whatever their number of sequences."""

import asyncio

import pytest
import torch

from rl.algorithms.losses import grpo
from rl.errors import ActorFailure
from rl.session.models import Models
from tests.actors.meshes import trainer_config
from tests.actors.test_layouts import batch, model_config


@pytest.fixture(scope="module")
def models(meshes):
    """A policy of two data-parallel ranks, a reference of four, from the same seed."""

    async def start():
        policy, reference = await asyncio.gather(
            meshes.trainer(trainer_config(fsdp=2), model_config(tied=True)),
            meshes.worker("reference", trainer_config(fsdp=4), model_config(tied=True)),
        )
        return Models({"trainer": policy, "reference": reference})

    return meshes.run(start())


def test_groups_of_two_and_of_four_agree_on_any_number_of_sequences_in_their_order(meshes, models):
    async def check():
        for count in range(1, len(batch()) + 1):
            shard = batch().select(list(range(count)))
            two, four = await asyncio.gather(
                *(
                    models.forward(shard, role=role, temperature=0.7)
                    for role in ("trainer", "reference")
                )
            )
            for name, values in two.items():
                assert len(values) == len(shard.tokens)
                torch.testing.assert_close(values, four[name], atol=1e-5, rtol=0)

    meshes.run(check())


def test_a_failing_rank_is_named_with_its_group_and_the_call(meshes, models):
    async def check():
        broken = batch()
        broken.tokens[0] = 10**6  # no such word
        with pytest.raises(
            ActorFailure, match=r"reference rank \d, forward_backward: IndexError"
        ) as error:
            await models.forward_backward(broken, grpo(), role="reference")
        assert (error.value.actor, error.value.call, error.value.kind) == (
            "reference",
            "forward_backward",
            "raised",
        )

    meshes.run(check())
