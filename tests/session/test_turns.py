"""A push between models that share devices changes turns no more often than it must."""

import asyncio
from pathlib import Path

import pytest

from rl.errors import RunError
from rl.generation.generator_config import GeneratorConfig
from rl.model.shards import Box
from rl.observe.checkpoint_folders import StepFolders
from rl.observe.events import Events
from rl.observe.spans import Stopwatch
from rl.session.concurrency import background
from rl.session.device_sharing import DeviceSharing
from rl.session.push import WeightPush
from rl.session.session_config import SessionConfig
from tests.kit.fakes import WAIT_S, Generator, Trainer


class Role:
    """Memory of a role, which notes its turns, and whether its weights come back."""

    def __init__(self, name: str, turns: list[str]):
        self.name = name
        self.turns = turns

    async def offload(self) -> None:
        self.turns.append(f"{self.name} leaves")

    async def onload(self, *, model: bool, optimizer: bool) -> None:
        self.turns.append(f"{self.name} with{'' if model else 'out'} weights")


class Colocated:
    """A trainer and two generators in turns on one set of devices."""

    def __init__(self) -> None:
        self.turns = list[str]()
        self.trainer = Trainer([], StepFolders(Path("none")))
        self.generators = [Generator(self.trainer.log, number) for number in range(2)]
        self.devices = DeviceSharing(["trainer", "generator"])
        for name in ("trainer", "generator"):
            self.devices.add(name, Role(name, self.turns))
        config = SessionConfig(pushes="in_order", generator=GeneratorConfig(replicas=2))
        watch = Stopwatch()
        self.push = WeightPush(config, self.trainer, self.devices, watch, Events())

    async def connect(self) -> None:
        for mesh in (self.trainer, *self.generators):
            await mesh.start()
        await self.push.connect(self.generators)

    async def step(self) -> None:
        """Sample, train, push."""
        async with self.devices.of("generator", "model"):
            pass
        async with self.devices.of("trainer", "model", "optimizer"):
            pass
        await self.push.settle()
        async with self.devices.of("trainer", "model", "optimizer"):
            self.trainer.version += 1
        await self.push.pull(self.push.publish())


async def test_a_step_with_a_checked_push_is_one_turn_of_the_generator_and_one_of_the_trainer():
    """The weights that a push overwrites do not come back before it."""
    scene = Colocated()
    await scene.connect()
    async with asyncio.timeout(WAIT_S), background(scene.push.run()):
        for _ in range(3):
            scene.turns.clear()
            await scene.step()
            assert [turn for turn in scene.turns if turn != "generator with weights"] == [
                *("generator leaves", "trainer with weights"),
                *("trainer leaves", "generator without weights"),
            ]
        await scene.push.settle()
    checks = [line for line in scene.trainer.log if line.startswith("forward")]
    assert checks == [f"forward {version}" for version in range(4)]


@pytest.mark.parametrize("side", ["weights", "log-probs"])
async def test_what_differs_is_found_before_the_weights_change(side):
    scene = Colocated()
    await scene.connect()
    if side == "weights":

        async def older(*_):
            return [{("w", Box.whole((4,))): 0}]

        scene.generators[1].weight_digests = older
    else:
        scene.trainer.wrong_since = 1
    with pytest.raises(RunError, match="push of policy" if side == "weights" else "canary of"):
        async with asyncio.timeout(WAIT_S), background(scene.push.run()):
            await scene.step()
            await scene.push.settle()
