"""A push over a network that is slow or fails, between meshes that compute nothing."""

import asyncio
import time
from pathlib import Path

import pytest
import torch

from rl.errors import ActorFailure, NodeLost, RunError
from rl.generation.generator_config import GeneratorConfig
from rl.model.shards import Box, Region
from rl.observe.checkpoint_folders import StepFolders
from rl.observe.events import WARNINGS, Event, Events
from rl.observe.spans import Stopwatch
from rl.session import push
from rl.session.concurrency import background
from rl.session.device_sharing import DeviceSharing
from rl.session.push import WeightPush
from rl.session.session_config import SessionConfig
from rl.weights.transport import TransferFailed, VersionGone, WeightPushConfig
from tests.kit.fakes import WAIT_S, Generator, Trainer

TOO_SLOW = TransferFailed("fetch of version 1: 15.0 MiB did not arrive within 60 s")
GIB_15 = (Region("w", (15 * 2**29,), Box.whole((15 * 2**29,))),)


def failure(cause: Exception) -> ActorFailure:
    """Return the failure that the controller gets of an exception in a generator."""
    made = ActorFailure(
        str(cause), actor="generator-0", rank=0, call="fetch_weights", kind="raised"
    )
    made.__cause__ = cause
    return made


class Scene:
    """A push from a trainer to generators."""

    def __init__(self, *, pipeline: str = "asynchronous", replicas: int = 1, **weights):
        self.trainer = Trainer([], StepFolders(Path("none")))
        self.warnings = []
        self.generators = [Generator(self.trainer.log, number) for number in range(replicas)]
        config = SessionConfig(
            pushes="newest" if pipeline == "asynchronous" else "in_order",
            generator=GeneratorConfig(replicas=replicas),
            weights=WeightPushConfig(
                **{"transport": "rdma", "canary_tolerance": 0.0, "digests": False} | weights
            ),
            max_restarts=2,
        )
        events = Events(self.note_warning)
        self.push = WeightPush(config, self.trainer, DeviceSharing(), Stopwatch(), events)
        self.changed = self.push._changed

    def note_warning(self, event: Event) -> None:
        if event["kind"] in WARNINGS:
            self.warnings.append(event["text"])

    async def connect(self) -> None:
        for mesh in (self.trainer, *self.generators):
            await mesh.start()
        await self.push.connect(self.generators)

    def step(self) -> None:
        """Give the trainer new weights."""
        self.trainer.version += 1
        self.push.publish()

    async def arrived(self, step: int) -> None:
        async with asyncio.timeout(WAIT_S), background(self.push.run()):
            await self.push.pull(step)


async def connected(**options) -> Scene:
    scene = Scene(**options)
    await scene.connect()
    return scene


def fail_pulls(generator: Generator, cause: Exception, times: int = 1) -> None:
    """Have the next pulls of ``generator`` fail."""
    left = [failure(cause)] * times

    async def fail():
        if left:
            raise left.pop()

    generator.pulling = fail


@pytest.mark.parametrize(
    ("generators_have_rdma", "chosen"), [([True, True], "rdma"), ([True, False], "tcp")]
)
async def test_auto_takes_rdma_if_every_host_has_it(generators_have_rdma, chosen):
    scene = Scene(replicas=2, transport="auto")
    hosts = {"trainer": True, "one": generators_have_rdma[0], "other": generators_have_rdma[1]}
    for mesh, (host, rdma) in zip((scene.trainer, *scene.generators), hosts.items(), strict=True):

        async def layout(host=host, rdma=rdma):
            return [(host, rdma, GIB_15)]

        mesh.layout = layout
        mesh.dtype = torch.bfloat16
    await scene.connect()
    assert scene.push._transfer.transport == chosen


def test_patience_of_a_push_grows_with_its_bytes():
    async def timeout_s(**weights) -> float:
        scene = Scene(replicas=8, **weights)
        given = []

        async def layout():
            return [("here", False, GIB_15)]

        async def open_publishers(transfer):
            given.append(transfer.timeout_s)
            return ["address"]

        for mesh in (scene.trainer, *scene.generators):
            mesh.layout = layout
            mesh.dtype = torch.bfloat16
        scene.trainer.open_publishers = open_publishers
        await scene.connect()
        return given[0]

    total = 8 * 15 * 2**30
    ten_gbit_s = 1.25e9
    assert asyncio.run(timeout_s()) > 2 * total / ten_gbit_s
    assert asyncio.run(timeout_s(min_gb_s=10.0)) == pytest.approx(60.0 + total / 10e9)


async def test_too_slow_generator_pulls_the_newest():
    scene = await connected()
    (generator,) = scene.generators

    async def slow():
        generator.pulling = None
        scene.step()
        await scene.changed.until(lambda: scene.push.state.readable.version == 2)
        raise failure(VersionGone("fetch of version 1: trainer rank 0 overwrote it meanwhile"))

    generator.pulling = slow
    scene.step()
    await scene.arrived(1)
    assert generator.version == 2
    assert scene.warnings == [
        "fetch of version 1: trainer rank 0 overwrote it meanwhile; pulling version 2"
    ]


@pytest.mark.parametrize("pipeline", ["deterministic", "asynchronous"])
async def test_version_gone_without_a_newer_one_ends_the_run(pipeline):
    scene = await connected(pipeline=pipeline)

    gone = VersionGone("fetch of version 1: trainer rank 0 holds nothing")
    fail_pulls(scene.generators[0], gone)
    scene.step()
    with pytest.raises(ActorFailure, match="holds nothing"):
        await scene.arrived(1)


@pytest.mark.parametrize("pipeline", ["deterministic", "asynchronous"])
@pytest.mark.parametrize("failures", [2, 3])
async def test_failed_transfer_is_repeated_at_growing_intervals(pipeline, failures, monkeypatch):
    monkeypatch.setattr(push, "RETRY_S", 0.02)
    scene = await connected(pipeline=pipeline)
    (generator,) = scene.generators
    fail_pulls(generator, TOO_SLOW, failures)
    fail = generator.pulling
    times = []

    async def pulling():
        times.append(time.monotonic())
        await fail()

    generator.pulling = pulling
    scene.step()
    if failures == 2:
        await scene.arrived(1)
        assert generator.version == 1
    else:
        with pytest.raises(NodeLost, match="failed 3 times in a row while the trainer is alive"):
            await scene.arrived(1)
    assert len(scene.warnings) == 2
    first, second, third = times
    assert second - first >= 0.02
    assert third - second >= 0.04


async def test_generator_that_joins_in_order_has_the_same_version():
    scene = await connected(pipeline="deterministic", replicas=2)
    async with asyncio.timeout(WAIT_S), background(scene.push.run()):
        scene.step()
        await scene.changed.until(lambda: scene.push.state.readable.version == 1)
        fail_pulls(scene.generators[1], TOO_SLOW)
        await scene.push.join(scene.generators[1])
    assert [generator.version for generator in scene.generators] == [0, 0]


async def test_transfer_from_a_dead_trainer_is_the_trainers_failure():
    scene = await connected()

    async def slow():
        scene.trainer.lose()
        raise failure(TOO_SLOW)

    scene.generators[0].pulling = slow
    scene.step()
    with pytest.raises(ActorFailure, match="trainer rank 0"):
        await scene.arrived(1)


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_publish_waits_for_a_fetch_of_the_version_that_it_overwrites(is_lost):
    scene = await connected()
    (generator,) = scene.generators
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def fetching():
        begun.set()
        await may_end.wait()
        generator.alive()

    generator.fetching = fetching
    async with asyncio.timeout(WAIT_S), background(scene.push.run()):
        scene.step()
        pull = asyncio.create_task(scene.push.pull(1))
        await begun.wait()
        scene.step()
        await scene.changed.until(lambda: scene.push.state.readable.version == 2)
        scene.step()
        for _ in range(20):
            await asyncio.sleep(0)
        assert "publish 3" not in scene.trainer.log
        generator.fetching = None
        if is_lost:
            generator.lose()
        may_end.set()
        await scene.changed.until(lambda: scene.push.state.readable.version == 3)
        assert await pull == 1
    assert generator.version == (0 if is_lost else 1)


async def test_a_generator_that_joins_loads_the_snapshot_that_the_others_hold():
    """Also while the policy is published behind it; a push brings all of them the policy."""
    scene = await connected(pipeline="lockstep", replicas=2)
    first, second = scene.generators
    async with asyncio.timeout(WAIT_S), background(scene.push.run()):
        await scene.push.hold(Path("a"))
        assert (scene.push.state.loaded.source, first.version, second.version) == (Path("a"), 1, 1)
        second.state = "absent"
        scene.step()
        await scene.changed.until(lambda: scene.push.state.readable.version == 2)
        await scene.push.join(second)
        assert (first.version, second.version) == (1, 1)
        await scene.push.pull(2)
        assert (scene.push.state.loaded.source, first.version, second.version) == (None, 2, 2)
        await scene.push.hold(Path("b"))
        scene.trainer.version += 1
        with pytest.raises(RunError, match="call push"):
            await scene.push.hold(None)
    assert [line for line in scene.trainer.log if "merge" in line] == [
        f"merge {name}" for name in "ab"
    ]
