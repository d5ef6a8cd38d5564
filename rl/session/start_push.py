"""Loading of the weights of a session without a trainer, checked."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from rl.actors.generator import GeneratorMesh
from rl.errors import RunError
from rl.model.digest import ShardDigests
from rl.observe.events import Events
from rl.observe.spans import Stopwatch
from rl.session.device_sharing import DeviceSharing
from rl.session.push import UNLIMITED, Pushed, PushState
from rl.session.push_checks import PushChecks
from rl.session.recovery import unless_lost
from rl.session.session_config import SessionConfig
from rl.training.start_weights import StartWeights
from rl.training.trainer_config import Source
from rl.types import Completion


class StartChecks(PushChecks):
    """Compares digests with those of the files, and the canary with that of the first generator."""

    expected = "the files'"

    def __init__(self, config: SessionConfig, weights: StartWeights, devices: DeviceSharing):
        super().__init__(config, None, devices)
        self._weights = weights
        self._first: Completion | None = None

    async def _source_digests(self, dtype: torch.dtype, source: Source) -> list[ShardDigests]:
        return [await asyncio.to_thread(self._weights.digests, dtype)]

    async def _source_logprobs(self, answer: Completion, source: Source) -> torch.Tensor:
        first = self._first = self._first or answer
        pairs = zip(first.tokens, answer.tokens, strict=False)
        same = next((n for n, (a, b) in enumerate(pairs) if a != b), len(answer.tokens))
        return torch.tensor([*first.logprobs[:same], *answer.logprobs[same:]])


@dataclass(eq=False)
class StartPush:
    """Stands in for :class:`rl.session.push.WeightPush` in a session without a trainer: the only
    version is 0, which each generator loads itself.
    """

    state: ClassVar = PushState(Pushed(0), Pushed(0), Pushed(0))
    max_generators: ClassVar[int] = UNLIMITED

    config: SessionConfig
    devices: DeviceSharing
    watch: Stopwatch
    events: Events
    metrics: dict[str, float] = field(default_factory=dict, init=False)
    """Metrics of the loads."""

    def __post_init__(self) -> None:
        config = self.config
        self._weights = StartWeights(
            model=config.model,
            seed=config.seed,
            start=config.start,
            timeout_s=config.deadlines.start,
        )
        self.checks = StartChecks(config, self._weights, self.devices)

    async def connect(self, generators: Sequence[GeneratorMesh]) -> str:
        """Have every generator load the weights; return their source."""
        await asyncio.gather(*(unless_lost(each, self.join(each)) for each in generators))
        return self._weights.describe()

    async def join(self, generator: GeneratorMesh) -> None:
        """Have a generator load the weights."""
        async with self.devices.of("generator"):
            await generator.connect(self._weights, [])
            with self.watch.span("pull", generator.name):
                await generator.pull_weights(0)
            self.events.emit("arrived", process=generator.name, version=0)
            loaded = await self.checks.ask(generator, 0, None)
        with self.watch.span("check"):
            await self.checks.compare_digests(loaded)
            await self.checks.compare_canary(loaded, self.metrics)

    async def remove(self, generator: GeneratorMesh) -> None:
        """Do nothing: no other process waits for a generator."""

    async def run(self) -> None:
        """Wait until the task is cancelled: there is nothing to publish."""
        await asyncio.Event().wait()

    def publish(self) -> int:
        """Return the one version."""
        return 0

    async def pull(self, version: int) -> int:
        """Return the one version, which every generator has."""
        return 0

    async def settle(self) -> None:
        """Do nothing: the weights do not change."""

    async def hold(self, source: Source) -> None:
        """Raise RunError: there are no other weights."""
        raise RunError("this session has no trainer, which snapshots are merged in")

    def has(self, source: Source) -> bool:
        """Whether these weights are the policy's."""
        return source is None
