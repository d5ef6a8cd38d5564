"""Checks of scripts/gpu_check on a session of the stand-in device, right and broken."""

from contextlib import asynccontextmanager

import pytest
import torch

from rl.compare.comparison import comparable
from scripts.gpu_check.sessions import judge_offload, judge_parity, judge_push
from scripts.gpu_check.setting import Setting
from scripts.gpu_check.trained import judge_graphs
from tests.session import faults

pytestmark = pytest.mark.long  # tests/gpu_check has the arithmetic of the verdicts
FIRST = "layers.0.feed_forward.w2.weight"


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    return Setting(device="cpu", folder=tmp_path_factory.mktemp("check"))


@pytest.fixture(scope="module")
def session(sessions, setting):
    """A session of float32 whose pushes are not compared, so that the checks have to."""

    async def start():
        trainer = setting.trainer("float32")
        given = setting.session(trainer=trainer, generator=setting.generator("float32"))
        session = await sessions.start_as(comparable(given))
        await session.load()
        await session.connect()
        return session

    return sessions.run(start())


@asynccontextmanager
async def broken(mesh, fault, mended):
    async def change(how):
        await mesh.call(mesh.actor.change, how)

    await change(fault)
    yield
    await change(mended)


async def test_equal_sides_pass_every_check(session, setting):
    async with session.running():
        parity = await judge_parity(session, setting)
        assert (parity.wrong, parity.numbers["tokens"]) == ("", 96)
        assert 0 < parity.numbers["logprob_error_max"] < 1e-4
        push = await judge_push(session, setting)
        assert (push.wrong, push.numbers["push_bytes"] > 100_000) == ("", True)
        graphs = await judge_graphs(session, setting)
        assert (graphs.wrong, graphs.numbers["moved"] > 0.1) == ("", True)
        offload = await judge_offload(session, setting, None, 0.0, 0.0)
        assert offload.wrong == ""
        assert offload.said.endswith("memory not read: needs a GPU")


async def test_a_generator_that_leaves_out_a_norm_is_found(session, setting):
    (generator,) = session.pool.meshes
    async with broken(generator, faults.drop_norm, faults.restore_norm), session.running():
        verdict = await judge_parity(session, setting)
    assert verdict.wrong.startswith("norm layers.1.attention.q_norm: its output differs by ")


def flip_a_bit(engine):
    parameter = next(shard for shard in engine.parameters() if shard.name == FIRST).tensor
    parameter.view(torch.int32)[3, 5] ^= 1


async def test_a_flipped_bit_of_a_pushed_parameter_is_found(session, setting):
    (generator,) = session.pool.meshes
    push = session.push

    async def push_and_flip():
        await push()
        await generator.call(generator.actor.change, flip_a_bit)

    session.push = push_and_flip
    async with session.running():
        verdict = await judge_push(session, setting, rounds=1)
    del session.push
    assert verdict.wrong.endswith(f"differ from the trainer's; the first is {FIRST}")


async def test_memory_that_a_model_keeps_is_found(session, setting):
    readings = iter([30.0, 38.0])
    async with session.running():
        verdict = await judge_offload(session, setting, lambda: next(readings), 0.5, 30.0)
    assert verdict.wrong.startswith("38.0 GiB are used while the trainer alone has the GPU")


async def test_weights_that_are_not_pushed_are_found(session, setting):
    # the last test of the session, which publishes this parameter, then all, never again
    await session.trainer.call(session.trainer.actor.skip, FIRST)
    async with session.running():
        verdict = await judge_push(session, setting)
        assert verdict.wrong.startswith("1 of the generator's parameters differ from the trainer's")
        assert verdict.wrong.endswith(FIRST)
        await session.trainer.call(session.trainer.actor.skip)
        verdict = await judge_graphs(session, setting)
    assert "the graphs compute with other weights, or another kernel" in verdict.wrong
